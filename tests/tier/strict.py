"""An eviction policy that minds that it is told of a slot what `EvictionPolicy` allows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kvoffload_patch.tier.policies.lru import LRUPolicy


class Strict(LRUPolicy):
    """As `LRUPolicy`; what is called as it must not be fails."""

    def __init__(self, key_of: Sequence[Hashable]) -> None:
        super().__init__(key_of)
        self.known: set[int] = set()
        self.pinned: set[int] = set()

    def insert(self, slots: Sequence[int]) -> None:
        assert not (self.known | self.pinned).intersection(slots)
        self.known.update(slots)
        super().insert(slots)

    def pin(self, slots: Sequence[int]) -> None:
        assert (self.known | self.pinned).issuperset(slots)
        self.known.difference_update(slots)
        self.pinned.update(slots)
        super().pin(slots)

    def unpin(self, slots: Sequence[int]) -> None:
        assert self.pinned.issuperset(slots)
        self.pinned.difference_update(slots)
        self.known.update(slots)
        super().unpin(slots)

    def remove(self, slots: Sequence[int]) -> None:
        self.known.difference_update(slots)
        self.pinned.difference_update(slots)
        super().remove(slots)

    def evict(self, count: int) -> Sequence[int]:
        chosen = super().evict(count)
        assert self.known.issuperset(chosen)
        self.known.difference_update(chosen)
        return chosen
