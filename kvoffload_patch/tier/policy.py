"""Which blocks are evicted first.

A policy is told of every use of the tier, in batches, and chooses what leaves it. It sees keys
only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders the keys that can be evicted. Every method costs O(1) for each key that it is given.

    Keys come in the order of their use: the last is the most recent. Of a prefix that is its head,
    so that a prefix leaves from its tail.
    """

    def miss(self, keys: Iterable[Hashable]) -> None:
        """These were computed, because the tier did not have them, and are about to be stored."""

    def insert(self, keys: Iterable[Hashable]) -> None:
        """These are in the tier now and can be evicted; their store was their last use."""

    def hit(self, keys: Iterable[Hashable]) -> None:
        """These were used on the GPU. Some may be unknown here, or pinned."""

    def pin(self, keys: Iterable[Hashable]) -> None:
        """These are loaded, which is a use, and cannot be evicted until `unpin`."""

    def unpin(self, keys: Iterable[Hashable]) -> None:
        """These can be evicted again; their load ends only now."""

    def remove(self, keys: Iterable[Hashable]) -> None:
        """These left the tier for another reason than eviction, pinned or not."""

    def evict(self, count: int) -> Sequence[Hashable]:
        """Choose keys that leave the tier now: ``count`` of them, or all that can be evicted."""


class LRUPolicy:
    """Least recently used first."""

    def __init__(self) -> None:
        self._order: OrderedDict[Hashable, None] = OrderedDict()

    def miss(self, keys: Iterable[Hashable]) -> None:
        """What was evicted is not remembered."""

    def insert(self, keys: Iterable[Hashable]) -> None:
        self._order.update(dict.fromkeys(keys))

    def hit(self, keys: Iterable[Hashable]) -> None:
        order, move_to_end = self._order, self._order.move_to_end
        for key in keys:
            if key in order:
                move_to_end(key)

    def pin(self, keys: Iterable[Hashable]) -> None:
        self.remove(keys)

    def unpin(self, keys: Iterable[Hashable]) -> None:
        self.insert(keys)

    def remove(self, keys: Iterable[Hashable]) -> None:
        pop = self._order.pop
        for key in keys:
            pop(key, None)

    def evict(self, count: int) -> Sequence[Hashable]:
        pop = self._order.popitem
        return [pop(last=False)[0] for _ in range(min(count, len(self._order)))]
