"""Eviction policies, one a file; `kvoffload_patch.tier.policy` says what each must do."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from importlib import import_module

from kvoffload_patch import policy_names
from kvoffload_patch.tier.policies.own import load
from kvoffload_patch.tier.policy import EvictionPolicy

# By the name that KVOFFLOAD_EVICTION has for it.
POLICIES: dict[str, Callable[[Sequence[Hashable]], EvictionPolicy]] = {
    name: getattr(import_module(f"{__name__}.{name}"), row.kind)
    for name, row in policy_names.POLICIES.items()
}


def policy_named(name: str) -> Callable[[Sequence[Hashable]], EvictionPolicy]:
    """What makes a policy: one of this package, or another's by entry point.

    Raises:
        PolicyRefused: there is none of this name, or it is none.
    """
    return POLICIES.get(name) or load(name)
