"""What the GPU holds as well leaves the tier first, and is stored again before the GPU loses it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import repeat

from kvoffload_patch.tier.policies.batches import BatchLists
from kvoffload_patch.tier.policy import EvictionPolicy
from kvoffload_patch.tier.tuning import (
    AHEAD_PARTS,
    AHEAD_TIMES,
    HELD_BACK_BLOCKS,
    HELD_BACK_TIMES,
)


def blocks_ahead(gpu_blocks: int, step_blocks: int) -> int:
    """How many of the GPU's free blocks the tier looks at before they are handed out.

    Two steps' worth, so that a store has a step's time before its block is overwritten, and an
    eighth of the GPU for loads, which take more at once. Chosen by replays (docs/policies.md).

    Args:
        gpu_blocks: of the GPU's prefix cache.
        step_blocks: that a step fills at most.
    """
    return max(AHEAD_TIMES * step_blocks, gpu_blocks // AHEAD_PARTS)


class Exclusive:
    """An eviction policy that gives up copies of what the GPU holds; another orders the rest.

    The other one is told of slots whose block the GPU has lost or is about to lose: each is new to
    it then, and used again if a request has hit or loaded the block meanwhile. It is not told of
    pins, because what is loaded is on the GPU.

    What the GPU holds is known as far as the tier is told of it. Told too little or too much,
    it evicts other blocks; which bytes are read never depends on it.

    Args:
        others: orders what the GPU has lost.
        key_of: of each slot, kept up to date.
        slot_of: of each key that has one, kept up to date.
    """

    def __init__(
        self,
        others: EvictionPolicy,
        key_of: Sequence[Hashable],
        slot_of: Mapping[Hashable, int],
    ) -> None:
        self._others = others
        self._key_of = key_of
        self._slot_of = slot_of
        self._copies = BatchLists(1, len(key_of))
        self._evictable = bytearray(len(key_of))  # neither pinned nor free nor being written
        self._block_of: dict[Hashable, int] = {}  # GPU blocks, by key
        self._key_in: dict[int, Hashable] = {}  # keys, by GPU block
        self._again: set[Hashable] = set()  # keys that were used again on the GPU
        self._owed = 0  # blocks to be handed out until it tries again

    # What the GPU holds

    @property
    def tight(self) -> bool:
        """Whether the GPU lately lost blocks before they could be stored.

        As where requests use nearly all of it, and others are given at once what one gives back.
        Nothing becomes a copy then, and what is computed is stored at once.
        """
        return self._owed > 0

    def handed_out(self, gpu_block_ids: Sequence[int], dropped: int) -> None:
        """These blocks are overwritten, and this number of them was still to be stored."""
        lost = dropped + self.leave(gpu_block_ids)
        self._owed = max(0, self._owed - len(gpu_block_ids)) + HELD_BACK_BLOCKS * lost
        self._owed = min(self._owed, HELD_BACK_TIMES * len(self._key_of))

    def filled(self, keys: Sequence[Hashable], gpu_block_ids: Sequence[int]) -> None:
        """These GPU blocks hold these keys, or will after this step."""
        if self.tight:
            for key in keys:
                self._block_of.pop(key, None)
            return
        self._block_of.update(zip(keys, gpu_block_ids))
        self._key_in.update(zip(gpu_block_ids, keys))

    def loaded(self, keys: Sequence[Hashable], gpu_block_ids: Sequence[int]) -> None:
        """A request loads these keys into these GPU blocks."""
        self.filled(keys, gpu_block_ids)
        self.used(keys)

    def used(self, keys: Iterable[Hashable]) -> None:
        """These are used again, and the GPU holds them."""
        if len(self._again) > len(self._key_in) + len(self._key_of):
            self._again.clear()  # of blocks that were never stored
        self._again.update(keys)

    def ended(self, keys: Sequence[Hashable]) -> None:
        """A request that used and computed these has ended.

        What a conversation adds will be used with what it began with, or not at all.
        """
        if 3 * len(self._again.intersection(keys)) >= len(keys):
            self.used([key for key in keys if key in self._block_of])

    def hit_on_gpu(
        self, prefix: Sequence[tuple[int, Hashable]], cached: Callable[[int, Hashable], bool]
    ) -> None:
        """A request hits blocks with keys, given head first, where they are cached still."""
        held = [(key, gpu_block_id) for gpu_block_id, key in prefix if cached(gpu_block_id, key)]
        keys = [key for key, _ in held]
        self.filled(keys, [gpu_block_id for _, gpu_block_id in held])
        self.used(keys)
        slot_of = self._slot_of
        self.hit([slot_of[key] for key in reversed(keys) if key in slot_of])

    def leave(self, gpu_block_ids: Iterable[int]) -> int:
        """The GPU has lost what these blocks held, or is about to lose it, in this order.

        Returns:
            How many of them held what has no slot.
        """
        blocks, slot_of, batch_of = list(gpu_block_ids), self._slot_of, self._copies.batch_of
        alone, lost = [], 0
        for gpu_block_id, key in zip(blocks, map(self._key_in.pop, blocks, repeat(None))):
            if key is not None and self._block_of.get(key) == gpu_block_id:
                del self._block_of[key]
                slot = slot_of.get(key)
                if slot is None:
                    lost += 1
                elif batch_of[slot]:
                    alone.append(slot)
        self._copies.take(alone)
        self._give(alone)
        return lost

    # As an eviction policy

    def grow(self) -> None:
        self._others.grow()
        self._copies.grow(len(self._key_of))
        self._evictable.extend(bytes(len(self._key_of) - len(self._evictable)))

    def miss(self, keys: Iterable[Hashable]) -> None:
        self._others.miss(keys)

    def insert(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._evictable[slot] = 1
        key_of, block_of = self._key_of, self._block_of
        self._copies.add(0, [slot for slot in slots if key_of[slot] in block_of])
        self._give([slot for slot in slots if key_of[slot] not in block_of])

    def hit(self, slots: Sequence[int]) -> None:
        # Where one is there twice, the last counts.
        once = list(dict.fromkeys(reversed(slots)))[::-1]
        free = [slot for slot in once if self._evictable[slot]]
        batch_of = self._copies.batch_of
        if self.tight:
            self._others.hit([slot for slot in free if not batch_of[slot]])
            copies = [slot for slot in free if batch_of[slot]]
            self._copies.take(copies)
            self._give(copies)
            return
        self._others.remove([slot for slot in free if not batch_of[slot]])
        self._copies.take(free)
        self._copies.add(0, free)

    def regroup(self, slots: Sequence[int]) -> None:
        """The order in which the GPU loses blocks has grouped them."""

    def pin(self, slots: Sequence[int]) -> None:
        self.remove(slots)

    def unpin(self, slots: Sequence[int]) -> None:
        self.insert(slots)

    def remove(self, slots: Sequence[int]) -> None:
        batch_of = self._copies.batch_of
        for slot in slots:
            self._evictable[slot] = 0
        self._others.remove([slot for slot in slots if not batch_of[slot]])
        self._copies.take(slots)

    def evict(self, count: int) -> Sequence[int]:
        chosen = self._copies.take_oldest(0, count)
        if len(chosen) < count:
            chosen += self._others.evict(count - len(chosen))
        for slot in chosen:
            self._evictable[slot] = 0
        return chosen

    def _give(self, slots: Sequence[int]) -> None:
        """The other policy orders these from now on."""
        if not slots:
            return
        self._others.insert(slots)
        key_of, again = self._key_of, self._again
        used = [slot for slot in slots if key_of[slot] in again]
        if used:
            self._others.hit(used)
            again.difference_update([key_of[slot] for slot in used])
