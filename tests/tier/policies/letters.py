"""A tier in small, whose keys are letters, for the tests of one eviction policy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from kvoffload_patch.tier.policy import EvictionPolicy

Policy = TypeVar("Policy", bound=EvictionPolicy)


class Letters(Generic[Policy]):
    """A policy with its slots, named by keys of one letter."""

    def __init__(self, policy: Callable[[Sequence[Hashable]], Policy], slots: int) -> None:
        self.key_of = [""] * slots
        self.policy = policy(self.key_of)
        self.slot_of: dict[str, int] = {}

    def slots(self, keys: str) -> list[int]:
        return [self.slot_of[key] for key in keys]

    def store(self, keys: str) -> str:
        """Store these, tail first; returns what is evicted for them."""
        self.policy.miss(keys[::-1])
        missing = len(keys) + len(self.slot_of) - len(self.key_of)
        out = self.evict(missing) if missing > 0 else ""
        free = [slot for slot in range(len(self.key_of)) if slot not in self.slot_of.values()]
        for key, slot in zip(keys, free):
            self.key_of[slot] = key
            self.slot_of[key] = slot
        self.policy.insert(self.slots(keys))
        return out

    def evict(self, count: int) -> str:
        out = "".join(self.key_of[slot] for slot in self.policy.evict(count))
        for key in out:
            del self.slot_of[key]
        return out

    def hit(self, keys: str) -> None:
        self.policy.hit(self.slots(keys))

    def ended(self, keys: str) -> None:
        self.policy.regroup(self.slots(keys))
