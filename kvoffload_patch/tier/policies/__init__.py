"""Eviction policies, one a file; `kvoffload_patch.tier.policy` says what each must do."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from kvoffload_patch.tier.policies.adaptive import AdaptivePolicy
from kvoffload_patch.tier.policies.arc import ArcPolicy
from kvoffload_patch.tier.policies.lru import LRUPolicy
from kvoffload_patch.tier.policies.own import load
from kvoffload_patch.tier.policies.s3fifo import S3FifoPolicy
from kvoffload_patch.tier.policy import EvictionPolicy

# By the name that KVOFFLOAD_EVICTION has for it.
POLICIES: dict[str, Callable[[Sequence[Hashable]], EvictionPolicy]] = {
    "adaptive": AdaptivePolicy,
    "arc": ArcPolicy,
    "lru": LRUPolicy,
    "s3fifo": S3FifoPolicy,
}


def policy_named(name: str) -> Callable[[Sequence[Hashable]], EvictionPolicy]:
    """What makes a policy: one of this package, or another's by entry point.

    Raises:
        PolicyRefused: there is none of this name, or it is none.
    """
    return POLICIES.get(name) or load(name)
