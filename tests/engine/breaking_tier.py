"""A tier that raises, once: TEST_BREAK names where, and TEST_BREAK_AT the call that does."""

from __future__ import annotations

import os
from typing import Any

# What is made to raise: the attribute of the tier that has it ("": the tier itself), and its name.
PLACES = {
    "statistics": ("_report", "flush"),
    "plan": ("_manager", "make_plan"),
    "cached": ("", "_computed"),
}


def install(breaker: Any) -> None:
    """Make the tier of this process raise, as the environment says."""
    part, name = PLACES[os.environ["TEST_BREAK"]]
    owner = getattr(breaker.tier, part) if part else breaker.tier
    as_made, at, calls = getattr(owner, name), int(os.environ["TEST_BREAK_AT"]), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise LookupError(f"{name} is made to fail")
        return as_made(*args, **kwargs)

    setattr(owner, name, call)
    # A hook is bound to what it calls.
    breaker._hooks.remove()
    breaker._hooks.install(breaker)
