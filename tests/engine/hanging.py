"""Scenarios of `hung_copies`: what who asks hears of a copy that never ends, and when."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

from scenarios import Stage, prompts

# More than deadline and grace, and what vLLM takes to end on a machine that has much else to do.
_HEARD_S = 40.0
# More than deadline and grace.
_NOTHING_S = 10.0


def waits_for_a_hung_load(stage: Stage) -> dict[str, Any]:
    """A prompt that has left the GPU's cache is asked again; its load never ends."""
    (prompt,) = prompts(40, 1, 400)
    stage.play([prompt], max_tokens=1)
    stage.push_out(41)
    return _ask(stage, prompt, _HEARD_S)


def hangs_while_idle(stage: Stage) -> dict[str, Any]:
    """A store never ends, nobody waits for it, and another prompt is asked much later."""
    prompt, other = prompts(42, 2, 400)
    first = _ask(stage, prompt, _HEARD_S)
    time.sleep(_NOTHING_S)
    return {"first": first, "second": _ask(stage, other, _HEARD_S)}


def hangs_while_reset(stage: Stage) -> dict[str, Any]:
    """A store never ends, and the prefix cache is reset; then a prompt is asked."""
    prompt, other = prompts(43, 2, 400)
    first = _ask(stage, prompt, _HEARD_S)
    reset = _hear(stage.llm.reset_prefix_cache, _HEARD_S)
    return {"first": first, "reset": reset, "second": _ask(stage, other, _HEARD_S)}


def is_left_hanging(stage: Stage) -> dict[str, Any]:
    """As `waits_for_a_hung_load`, where nobody is ever told."""
    (prompt,) = prompts(40, 1, 400)
    stage.play([prompt], max_tokens=1)
    stage.push_out(41)
    return _ask(stage, prompt, _NOTHING_S)


def _ask(stage: Stage, prompt: list[int], limit_s: float) -> dict[str, Any]:
    return _hear(lambda: stage.play([prompt], max_tokens=1), limit_s)


def _hear(call: Any, limit_s: float) -> dict[str, Any]:
    """What it raises, or that it has returned, and after how long; None if neither in time."""
    said = queue.Queue[str]()

    def run() -> None:
        try:
            call()
            said.put("answered")
        except Exception as error:  # noqa: BLE001 - the error is the answer
            said.put(f"{type(error).__name__}: {error}")

    begin = time.monotonic()
    threading.Thread(target=run, daemon=True).start()
    try:
        heard = said.get(timeout=limit_s)
    except queue.Empty:
        return {"heard": None, "after_s": limit_s}
    return {"heard": heard, "after_s": time.monotonic() - begin}
