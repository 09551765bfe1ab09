"""An engine that is ended and started again in its process, and what the process holds after it."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

from scenarios import Stage, cached_of, prompts, tokens_of
from vllm import LLM

_PATIENCE_S, _STILL_S = 30.0, 1.0


def restarts(stage: Stage) -> dict[str, Any]:
    """The same prompts, new to each of some engines and then pushed out of its GPU's cache.

    TEST_RESTARTS: how many come after the first. ``held``: after each engine's end, descriptors,
    threads, and KiB of memory that is left out of core dumps, as the tier's is.
    """
    asked, seen, held = prompts(33, 4, 420), [], []
    arguments = stage.arguments
    for number in range(1 + int(os.environ.get("TEST_RESTARTS", "2"))):
        if number:
            stage = Stage(LLM(**arguments))
        first = [stage.play([prompt])[0] for prompt in asked]
        stage.push_out(330)
        again = [stage.play([prompt])[0] for prompt in asked]
        tokens, cached = (list(map(of, (first, again))) for of in (tokens_of, cached_of))
        seen.append({"tokens": tokens, "cached": [sum(one) for one in cached]})
        stage.llm.llm_engine.engine_core.shutdown()
        vars(stage).clear()
        gc.collect()
        held.append(_settled(held[-1] if number > 1 else None))
    return {"seen": seen, "held": held}


def _settled(before: dict[str, int] | None) -> dict[str, int]:
    """What is held once it is as it was, or does not change; vLLM's own threads end a bit later."""
    until, found = time.monotonic() + _PATIENCE_S, _held()
    while found != before and time.monotonic() < until:
        time.sleep(_STILL_S)
        earlier, found = found, _held()
        if before is None and found == earlier:
            break
    return found


def _held() -> dict[str, int]:
    ours = [one.name for one in threading.enumerate() if one.name.startswith("kvoffload")]
    kib, undumped, kernels = 0, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            kernels = "[v" in line  # such as [vvar]
        elif size := re.match(r"Size: +(\d+) kB", line):
            kib = int(size[1])
        elif line.startswith("VmFlags:") and "dd" in line.split() and not kernels:
            undumped += kib
    return {
        "descriptors": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(),
        "tier's threads": len(ours), "undumped": undumped,
    }  # fmt: skip
