"""Eviction policies, one a file; `kvoffload_patch.tier.policy` says what each must do."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from kvoffload_patch.tier.policies.arc import ArcPolicy
from kvoffload_patch.tier.policies.lru import LRUPolicy
from kvoffload_patch.tier.policy import EvictionPolicy

# By the name that KVOFFLOAD_EVICTION has for it.
POLICIES: dict[str, Callable[[Sequence[Hashable]], EvictionPolicy]] = {
    "arc": ArcPolicy,
    "lru": LRUPolicy,
}
