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
    """Least recently used first.

    Keys that were used together stay together: moving them costs less than a linked list of keys,
    of which a full tier has a million, none of them in the processor's caches.
    """

    def __init__(self) -> None:
        self._batch_of: dict[Hashable, int] = {}
        # By number, the oldest first. Within a batch the most recent key is the first: from its end
        # a dict gives keys at once, from its front only after looking at all that have left.
        self._batches: OrderedDict[int, dict[Hashable, None]] = OrderedDict()
        self._last = 0

    def miss(self, keys: Iterable[Hashable]) -> None:
        """What was evicted is not remembered."""

    def insert(self, keys: Iterable[Hashable]) -> None:
        ordered = tuple(keys)
        if ordered:
            self._last += 1
            self._batches[self._last] = dict.fromkeys(reversed(ordered))
            self._batch_of.update(dict.fromkeys(ordered, self._last))

    def hit(self, keys: Iterable[Hashable]) -> None:
        known = [key for key in keys if key in self._batch_of]
        self._take(known)
        self.insert(known)

    def pin(self, keys: Iterable[Hashable]) -> None:
        self._take(keys)

    def unpin(self, keys: Iterable[Hashable]) -> None:
        self.insert(keys)

    def remove(self, keys: Iterable[Hashable]) -> None:
        self._take(keys)

    def evict(self, count: int) -> Sequence[Hashable]:
        evicted: list[Hashable] = []
        while self._batches and (missing := count - len(evicted)) > 0:
            oldest, batch = next(iter(self._batches.items()))
            if len(batch) <= missing:
                evicted += reversed(batch)
                del self._batches[oldest]
            else:
                evicted += [batch.popitem()[0] for _ in range(missing)]
        forget = self._batch_of.pop
        for key in evicted:
            forget(key)
        return evicted

    def _take(self, keys: Iterable[Hashable]) -> None:
        """Take these keys out of their batches, as far as they are in any."""
        batches, forget = self._batches, self._batch_of.pop
        for key in keys:
            number = forget(key, 0)
            if number:
                batch = batches[number]
                del batch[key]
                if not batch:
                    del batches[number]
