"""A user's own eviction policy: an entry point that makes one for the list of the slots' keys."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from kvoffload_patch.policy_names import GROUP, entry_points
from kvoffload_patch.tier.policy import EvictionPolicy

METHODS = ("grow", "miss", "insert", "hit", "regroup", "pin", "unpin", "remove", "evict")


class PolicyRefused(ValueError):
    """There is no such policy, or it is none; the text is one sentence."""


def load(name: str) -> Callable[[Sequence[Hashable]], EvictionPolicy]:
    """What makes the policy of an entry point; one is made, of no slots, to see what it has.

    Raises:
        PolicyRefused: as its text says.
    """
    found = entry_points(name)
    if len(found) != 1:
        raise PolicyRefused(
            f"expected one entry point {name!r} of {GROUP}, found {len(found)}; install one "
            "package that has it, or leave KVOFFLOAD_EVICTION out."
        )
    try:
        make: Callable[[Sequence[Hashable]], EvictionPolicy] = found[0].load()
        policy = make([])
    except Exception as error:
        raise PolicyRefused(
            f"expected an eviction policy behind {found[0].value} ({GROUP}), found "
            f"{type(error).__name__}: {error}; correct it, or leave KVOFFLOAD_EVICTION out."
        ) from error
    missing = [method for method in METHODS if not callable(getattr(policy, method, None))]
    if missing:
        raise PolicyRefused(
            f"expected an eviction policy behind {found[0].value} ({GROUP}), found "
            f"{type(policy).__name__} without {', '.join(missing)}; give it what "
            "kvoffload_patch.tier.policy says, or leave KVOFFLOAD_EVICTION out."
        )
    return make
