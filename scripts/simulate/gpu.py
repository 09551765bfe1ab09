"""The GPU's blocks by vLLM's rules: a prefix cache, and a queue of blocks that nobody uses.

A block that a request gives back keeps its key until it is handed out again. The queue's front is
handed out first: blocks without a key come to its front, those with one to its end, in the order in
which they are given back, which is a request's tail first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

Key = int


class GpuPool:
    """Blocks ``0 .. num_blocks - 1``.

    Attributes:
        key_of: the key that each block holds; None if it holds none.
        free: blocks that nobody uses, the next to be handed out first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.key_of: list[Key | None] = [None] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._uses = [0] * num_blocks
        self._block_of: dict[Key, int] = {}

    def find(self, keys: Sequence[Key]) -> list[int]:
        """The blocks of the longest cached prefix of ``keys``."""
        found = []
        block_of = self._block_of
        for key in keys:
            block = block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def holds(self, key: Key) -> bool:
        """Whether a block has this key."""
        return key in self._block_of

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody uses."""
        uses = self._uses
        return sum([not uses[block] for block in blocks])

    def hold(self, blocks: Iterable[int]) -> None:
        """One more user of each of these cached blocks."""
        uses, free = self._uses, self.free
        for block in blocks:
            if not uses[block]:
                del free[block]
            uses[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out blocks; what they held is forgotten. There must be as many."""
        take, key_of, uses = self.free.popitem, self.key_of, self._uses
        blocks = []
        for _ in range(count):
            block, _ = take(last=False)
            key = key_of[block]
            if key is not None:
                del self._block_of[key]
                key_of[block] = None
            uses[block] = 1
            blocks.append(block)
        return blocks

    def cache(self, key: Key, block: int) -> None:
        """A block in use has this key from now on, unless another block has it already."""
        if key not in self._block_of:
            self._block_of[key] = block
            self.key_of[block] = key

    def release(self, blocks: Sequence[int]) -> list[int]:
        """A user gives these back, tail first; returns those that nobody uses any more."""
        uses, key_of = self._uses, self.key_of
        idle = []
        for block in blocks:
            uses[block] -= 1
            if not uses[block]:
                idle.append(block)
        first = [block for block in idle if key_of[block] is None]
        self.free.update(dict.fromkeys(idle))
        for block in reversed(first):
            self.free.move_to_end(block, last=False)
        return idle

    def next_out(self, count: int) -> tuple[list[int], list[Key]]:
        """Of so many blocks that are handed out next, those that hold something, and its keys."""
        of_all = ((block, self.key_of[block]) for block in islice(self.free, count))
        held = [(block, key) for block, key in of_all if key is not None]
        return [block for block, _ in held], [key for _, key in held]

    def hand_out_first(self, blocks: Iterable[int]) -> None:
        """Of these, those that nobody uses are handed out before all others, the last one first."""
        for block in blocks:
            if not self._uses[block]:
                self.free.move_to_end(block, last=False)

    def block_of(self, key: Key) -> int | None:
        """The block that has this key."""
        return self._block_of.get(key)

    def make_last(self, block: int) -> None:
        """A block that nobody uses is handed out after all others."""
        self.free.move_to_end(block)
