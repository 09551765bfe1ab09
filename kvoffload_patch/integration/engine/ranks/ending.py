"""Ending the process of an engine core that cannot end in order: its thread is blocked."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kvoffload_patch.integration.engine.tuning import SENDING_S
from kvoffload_patch.integration.worker.rpc import end_process

# What an engine core's output thread sends to every client, and ends. A client without a server, as
# `vllm.LLM` is, waits for ever for a process that is gone, and raises when it is told.
_DEAD = b"ENGINE_CORE_DEAD"


def ending(engine_core: Any) -> Callable[[], object] | None:
    """What ends the process of an engine core; None if that is the front end's, a user's own."""
    outputs = getattr(engine_core, "output_queue", None)
    return None if outputs is None else partial(_end, outputs)


def _end(outputs: Any) -> None:
    try:
        outputs.put_nowait(_DEAD)
        time.sleep(SENDING_S)
    finally:
        end_process()
