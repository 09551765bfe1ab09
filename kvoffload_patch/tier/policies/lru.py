"""Least recently used first."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from kvoffload_patch.tier.policies.batches import BatchLists


class LRUPolicy:
    """One list; every use makes a block the most recent of it."""

    def __init__(self, key_of: Sequence[Hashable]) -> None:
        self._key_of = key_of
        self._lists = BatchLists(1, len(key_of))

    def grow(self) -> None:
        self._lists.grow(len(self._key_of))

    def miss(self, keys: Collection[Hashable]) -> None:
        """What was evicted is not remembered."""

    def insert(self, slots: Sequence[int]) -> None:
        self._lists.add(0, slots)

    def hit(self, slots: Sequence[int]) -> None:
        self._lists.make_recent(slots)

    def regroup(self, slots: Sequence[int]) -> None:
        self._lists.make_recent(slots)

    def pin(self, slots: Sequence[int]) -> None:
        self._lists.take(slots)

    def unpin(self, slots: Sequence[int]) -> None:
        self._lists.add(0, slots)

    def remove(self, slots: Sequence[int]) -> None:
        self._lists.take(slots)

    def evict(self, count: int) -> Sequence[int]:
        return self._lists.take_oldest(0, count)
