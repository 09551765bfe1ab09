"""A small queue for blocks that are new, a main one for those that were used again.

S3-FIFO (Yang and others, 2023). It moves nothing when a block is used, and knows no prefixes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence


class S3FifoPolicy:
    """S3-FIFO (Yang and others, 2023): a small queue for what is new, a main one, and a memory.

    A tenth of the slots are the small queue's. What was not used in it leaves the tier and is
    remembered; what was, and what comes again while it is remembered, goes to the main queue.
    There a block that was used since goes round again, three times at most: a round for each use,
    so an eviction costs O(1) for each block evicted and each use since.
    """

    def __init__(self, key_of: Sequence[Hashable]) -> None:
        self._key_of = key_of
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}
        self._lost: OrderedDict[Hashable, None] = OrderedDict()
        self._pinned: dict[int, int] = {}  # with their uses

    def grow(self) -> None:
        """Queues have no size of their own."""

    def miss(self, keys: Collection[Hashable]) -> None:
        """A key that is remembered is looked for when it is stored."""

    def insert(self, slots: Sequence[int]) -> None:
        for slot in slots:
            again = self._key_of[slot] in self._lost
            self._lost.pop(self._key_of[slot], None)
            (self._main if again else self._small)[slot] = None
            self._uses[slot] = 0

    def hit(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot in self._uses:
                self._uses[slot] = min(self._uses[slot] + 1, 3)

    def regroup(self, slots: Sequence[int]) -> None:
        """What is stored in one step leaves in its order; what a request used has no other."""

    def pin(self, slots: Sequence[int]) -> None:
        uses = {slot: self._uses[slot] for slot in slots if slot in self._uses}
        self.remove(slots)
        self._pinned.update(uses)

    def unpin(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._main[slot] = None
            self._uses[slot] = min(self._pinned.pop(slot, 0) + 1, 3)

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._small.pop(slot, None)
            self._main.pop(slot, None)
            self._uses.pop(slot, None)
            self._pinned.pop(slot, None)

    def evict(self, count: int) -> Sequence[int]:
        evicted: list[int] = []
        while len(evicted) < count and self._uses:
            small = len(self._small) * 10 > len(self._key_of) or not self._main
            slot, _ = (self._small if small else self._main).popitem(last=False)
            if self._uses[slot]:
                self._uses[slot] = 0 if small else self._uses[slot] - 1
                self._main[slot] = None
                continue
            del self._uses[slot]
            evicted.append(slot)
            if small:
                self._lost[self._key_of[slot]] = None
                if len(self._lost) > len(self._key_of):
                    self._lost.popitem(last=False)
        return evicted
