"""Ways to run all engines of a session: what vLLM's CPU platform turns off is on.

TEST_WAY is ``asynchronous``: asynchronous scheduling wherever vLLM itself has decided for it, which
its CPU platform overrules; or ``v2``: that, and model runner V2, its kernels on Triton's
interpreter. `scripts/matrix features --way` sets it. Imports nothing of vLLM's.
"""

from __future__ import annotations

import os
import re
from typing import Any

_SCHEDULED = "scheduling as vLLM has decided, asynchronous: "
_RUNNER_V2 = "Using V2 Model Runner"
_NOT = re.compile(r"Async(?:hronous)? [Ss]cheduling[^\n]*disabled[^\n]*")
_seen: dict[int, dict[str, Any]] = {}


def chosen() -> str:
    """The way; empty: as vLLM's CPU platform has it."""
    return os.environ.get("TEST_WAY", "")


def environment() -> dict[str, str]:
    """What every engine's environment has for it."""
    return {"VLLM_USE_V2_MODEL_RUNNER": "1", "TEST_TRITON": "1"} if chosen() == "v2" else {}


def say(asynchronous: bool) -> None:
    """Print how an engine is going to schedule, for `note`."""
    print(f"{_SCHEDULED}{asynchronous}", flush=True)


def note(log: str) -> None:
    """An engine with the tier has printed this; the same one is noted once."""
    why = _NOT.search(log)
    _seen[hash(log)] = {
        "asynchronous": f"{_SCHEDULED}True" in log,
        "v2": _RUNNER_V2 in log,
        **({"why": why[0]} if why else {}),
    }


def taken() -> list[dict[str, Any]]:
    """What was noted since this was last called."""
    found = list(_seen.values())
    _seen.clear()
    return found
