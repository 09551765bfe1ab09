"""Which blocks are evicted first.

A policy is told of every use of the tier, in batches, and chooses what leaves it. It names blocks
by the CPU slots that hold them: numbers from 0 on find their state in lists, which costs a third of
looking up keys that are in no processor cache.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Protocol


class PolicyBroken(RuntimeError):
    """A policy does what `EvictionPolicy` does not allow.

    Args:
        policy: which it is.
        found: what it has done, in words.
    """

    def __init__(self, policy: EvictionPolicy, found: str) -> None:
        name = f"{type(policy).__module__}.{type(policy).__qualname__}"
        super().__init__(
            f"expected the eviction policy {name} to give up blocks that it may, each once, found "
            f"{found}; correct it, or choose another by KVOFFLOAD_EVICTION"
        )


class EvictionPolicy(Protocol):
    """Orders the slots that can be evicted. Every method costs O(1) for each that it is given.

    It is made with a list of the key of each slot, which the tier keeps up to date. Slots come in
    the order of their use: the last is the most recent. Of a prefix that is its head, so that a
    prefix leaves from its tail. With `eager`, whatever a policy chooses, `tier/prefixes.py` lets
    nothing leave that something else rests on, as far as prefixes are known.
    """

    def grow(self) -> None:
        """The list of keys has become longer: more slots are usable."""

    def miss(self, keys: Collection[Hashable]) -> None:
        """These were computed, because the tier did not have them, and are about to be stored.

        Each is there once, those of a prefix head first. They are not kept: they may change.
        """

    def insert(self, slots: Sequence[int]) -> None:
        """These hold new keys and can be evicted; their store was their last use."""

    def hit(self, slots: Sequence[int]) -> None:
        """These were used on the GPU. Some may be unknown here, or pinned."""

    def regroup(self, slots: Sequence[int]) -> None:
        """A request that used these has ended: no further use, but they belong together.

        Some were used by it when it began, others were stored since, in several steps; of what was
        used or stored all at once nothing is said. From now on its tail goes before its head. Some
        may be unknown here, or pinned.
        """

    def pin(self, slots: Sequence[int]) -> None:
        """These are loaded, which is a use, and cannot be evicted until `unpin`.

        Some may be pinned already, for another load; `unpin` comes once all of them are over.
        """

    def unpin(self, slots: Sequence[int]) -> None:
        """These can be evicted again; their load ends only now."""

    def remove(self, slots: Sequence[int]) -> None:
        """Their keys left the tier for another reason than eviction, pinned or not."""

    def evict(self, count: int) -> Sequence[int]:
        """Choose slots to be used for others: ``count`` of them, or all that can be evicted.

        Otherwise the tier raises `PolicyBroken`: for more, a pinned one, one below 0, or one twice.
        """
