"""Keys of the last evictions, which a policy remembers without their blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable, Iterable
from itertools import repeat


class LostKeys:
    """Evicted keys in the order in which they were, and which list each has left.

    Args:
        lists: how many there are.

    Attributes:
        counts: keys that are remembered, of each list.
    """

    def __init__(self, lists: int) -> None:
        self.counts = [0] * lists
        self._left: dict[Hashable, int] = {}
        self._evictions: deque[list[Hashable]] = deque()
        self._num_evicted = 0  # keys in there

    def __len__(self) -> int:
        return len(self._left)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._left

    def of(self, keys: Iterable[Hashable]) -> Container[Hashable]:
        """What says which of these are remembered: nothing, where none is."""
        if not self._left or self._left.keys().isdisjoint(keys):
            return ()
        return self._left

    def add(self, keys: list[Hashable], which: int, limit: int) -> None:
        """These have left a list; one that is remembered already is so of the first that it left.

        The very list is kept. Beyond so many keys, whole evictions are forgotten, oldest first.
        """
        if not keys:
            return
        if len(keys) > limit:  # as where a policy gives up all that it has
            self.clear()
            return
        left, before = self._left, len(self._left)
        for key in keys:
            left.setdefault(key, which)
        self.counts[which] += len(left) - before
        self._evictions.append(keys)
        self._num_evicted += len(keys)
        while self._num_evicted > limit:
            oldest = self._evictions.popleft()
            self._num_evicted -= len(oldest)
            self.forget(oldest)

    def forget(self, keys: Iterable[Hashable]) -> list[int]:
        """Forget that these were evicted; returns how many were, from each list."""
        gone = list(map(self._left.pop, keys, repeat(None)))
        found = [gone.count(which) for which in range(len(self.counts))]
        self.counts = [count - less for count, less in zip(self.counts, found)]
        return found

    def clear(self) -> None:
        """Nothing is remembered any more."""
        self._left.clear()
        self._evictions.clear()
        self.counts, self._num_evicted = [0] * len(self.counts), 0
