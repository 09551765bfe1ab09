"""Who is evicted first. A policy sees only keys of blocks that may be evicted at this moment."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders the evictable keys. Every method is O(1)."""

    def add(self, key: Hashable) -> None:
        """``key`` became evictable, and was used just now."""

    def touch(self, key: Hashable) -> None:
        """``key``, which is evictable, was used just now."""

    def remove(self, key: Hashable) -> None:
        """``key`` is no longer evictable (it is being read)."""

    def pop(self) -> Hashable:
        """Take out the key to evict next; raises KeyError when there is none."""

    def __len__(self) -> int:
        """Number of evictable keys."""


class LRUPolicy:
    """Least recently used first."""

    def __init__(self) -> None:
        self._order: OrderedDict[Hashable, None] = OrderedDict()

    def add(self, key: Hashable) -> None:
        self._order[key] = None

    def touch(self, key: Hashable) -> None:
        self._order.move_to_end(key)

    def remove(self, key: Hashable) -> None:
        del self._order[key]

    def pop(self) -> Hashable:
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)
