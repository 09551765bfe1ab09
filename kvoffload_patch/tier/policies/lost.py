"""Keys of the last evictions, which a policy remembers without their blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable


class LostKeys:
    """Evicted keys in the order in which they were, and which list each has left.

    They are in a set for each list. Many keys are added, looked for and forgotten by one call, and
    a look at a large set is half as long as one at a dict that would say the list as well.

    Args:
        lists: how many there are.
    """

    def __init__(self, lists: int) -> None:
        self._left = [set[Hashable]() for _ in range(lists)]
        self._evictions: deque[list[Hashable]] = deque()
        self._num_evicted = 0  # keys in there

    @property
    def counts(self) -> list[int]:
        """Keys that are remembered, of each list."""
        return list(map(len, self._left))

    def of(self, keys: Collection[Hashable]) -> set[Hashable]:
        """Those of these that are remembered."""
        found = set[Hashable]()
        for left in filter(None, self._left):
            found |= left.intersection(keys)
        return found

    def add(self, keys: list[Hashable], which: int, limit: int) -> None:
        """These have left a list; one that is remembered already is so of the first that it left.

        The very list is kept. Beyond so many keys, whole evictions are forgotten, oldest first.
        """
        if not keys:
            return
        if len(keys) > limit:  # as where a policy gives up all that it has
            self.clear()
            return
        its = self._left[which]
        its.update(keys)
        for others in filter(None, self._left):
            if others is not its:
                its -= others.intersection(keys)
        self._evictions.append(keys)
        self._num_evicted += len(keys)
        while self._num_evicted > limit:
            oldest = self._evictions.popleft()
            self._num_evicted -= len(oldest)
            self.forget(oldest)

    def forget(self, keys: Collection[Hashable]) -> list[int]:
        """Forget that these were evicted; returns how many were, from each list."""
        before = self.counts
        for left in filter(None, self._left):
            left.difference_update(keys)
        return [had - len(left) for had, left in zip(before, self._left)]

    def clear(self) -> None:
        """Nothing is remembered any more."""
        for left in self._left:
            left.clear()
        self._evictions.clear()
        self._num_evicted = 0
