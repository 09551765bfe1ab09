"""Which blocks are evicted first.

A policy is told of every use of the tier, in batches, and chooses what leaves it. It names blocks
by the CPU slots that hold them: numbers from 0 on find their state in lists, which costs a third of
looking up keys that are in no processor cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders the slots that can be evicted. Every method costs O(1) for each that it is given.

    It is made with a list of the key of each slot, which the tier keeps up to date. Slots come in
    the order of their use: the last is the most recent. Of a prefix that is its head, so that a
    prefix leaves from its tail.
    """

    def grow(self) -> None:
        """The list of keys has become longer: more slots are usable."""

    def miss(self, keys: Iterable[Hashable]) -> None:
        """These were computed, because the tier did not have them, and are about to be stored."""

    def insert(self, slots: Sequence[int]) -> None:
        """These hold new keys and can be evicted; their store was their last use."""

    def hit(self, slots: Sequence[int]) -> None:
        """These were used on the GPU. Some may be unknown here, or pinned."""

    def pin(self, slots: Sequence[int]) -> None:
        """These are loaded, which is a use, and cannot be evicted until `unpin`."""

    def unpin(self, slots: Sequence[int]) -> None:
        """These can be evicted again; their load ends only now."""

    def remove(self, slots: Sequence[int]) -> None:
        """Their keys left the tier for another reason than eviction, pinned or not."""

    def evict(self, count: int) -> Sequence[int]:
        """Choose slots to be used for others: ``count`` of them, or all that can be evicted."""


class _Batch:
    """Slots that were used together, the first to be evicted first.

    ``slots[:begin]`` and those that were used since are no part of it any more; ``left`` are.
    """

    __slots__ = ("begin", "left", "slots")

    def __init__(self, slots: Sequence[int]) -> None:
        self.slots = slots
        self.begin = 0
        self.left = len(slots)


class LRUPolicy:
    """Least recently used first.

    Slots that were used together stay together: a number for each says which batch it belongs to.
    """

    def __init__(self, key_of: Sequence[Hashable]) -> None:
        self._key_of = key_of
        self._batch_of = [0] * len(key_of)  # 0: in none
        self._batches: OrderedDict[int, _Batch] = OrderedDict()  # by number, the oldest first
        self._last = 0

    def grow(self) -> None:
        self._batch_of += [0] * (len(self._key_of) - len(self._batch_of))

    def miss(self, keys: Iterable[Hashable]) -> None:
        """What was evicted is not remembered."""

    def insert(self, slots: Sequence[int]) -> None:
        if not slots:
            return
        self._last = number = self._last + 1
        batch_of = self._batch_of
        for slot in slots:
            batch_of[slot] = number
        self._batches[number] = _Batch(slots)

    def hit(self, slots: Sequence[int]) -> None:
        # Once each: a slot that is there twice would be counted twice in its batch.
        latest = dict.fromkeys(reversed(slots))
        known = [slot for slot in reversed(latest) if self._batch_of[slot]]
        self._take(known)
        self.insert(known)

    def pin(self, slots: Sequence[int]) -> None:
        self._take(slots)

    def unpin(self, slots: Sequence[int]) -> None:
        self.insert(slots)

    def remove(self, slots: Sequence[int]) -> None:
        self._take(slots)

    def evict(self, count: int) -> Sequence[int]:
        evicted: list[int] = []
        batch_of = self._batch_of
        while self._batches and (missing := count - len(evicted)) > 0:
            number = next(iter(self._batches))
            batch = self._batches[number]
            if batch.left < len(batch.slots) - batch.begin:
                self._shrink(number, batch)
            chosen = batch.slots[batch.begin : batch.begin + missing]
            batch.begin += len(chosen)
            batch.left -= len(chosen)
            if not batch.left:
                del self._batches[number]
            evicted += chosen
        for slot in evicted:
            batch_of[slot] = 0
        return evicted

    def _take(self, slots: Sequence[int]) -> None:
        """Take these slots out of their batches, as far as they are in any."""
        batches, batch_of = self._batches, self._batch_of
        for slot in slots:
            number = batch_of[slot]
            if number:
                batch_of[slot] = 0
                batch = batches[number]
                batch.left -= 1
                if not batch.left:
                    del batches[number]
                elif 2 * batch.left < len(batch.slots):
                    self._shrink(number, batch)

    def _shrink(self, number: int, batch: _Batch) -> None:
        """Forget what has left a batch: at most as much work as was done to take it out."""
        batch_of = self._batch_of
        batch.slots = [s for s in batch.slots[batch.begin :] if batch_of[s] == number]
        batch.begin = 0
