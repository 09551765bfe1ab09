"""What the tier does for a request, in vLLM's own traces; made only where vLLM's tracing is on.

A request's trace has one span of the tier, beside vLLM's `llm_request`: from its first lookup until
it is admitted. Its name says whether the tier had anything of it.
"""

from __future__ import annotations

import logging
import time
from typing import Any

logger = logging.getLogger("vllm.kvoffload_patch")

LOOKUP, LOAD = "kvoffload.lookup", "kvoffload.load"


class Spans:
    """Gives spans to vLLM's tracer; one that fails is the last."""

    def __init__(self) -> None:
        from vllm.tracing import instrument_manual
        from vllm.tracing.otel import extract_trace_context

        self._context_of, self._give = extract_trace_context, instrument_manual
        self._works = True

    def now(self) -> int:
        """Nanoseconds since the epoch, as spans have them."""
        return time.time_ns()

    def admitted(self, request: Any, since: int, queried: int, hit: int) -> None:
        """A request is scheduled for the first time since it was looked up.

        Args:
            request: of vLLM's.
            since: when it was looked up first.
            queried: tokens of it that the GPU lacked.
            hit: of these, what the tier had.
        """
        if not self._works:
            return
        attributes = {
            "gen_ai.request.id": request.request_id,
            "kvoffload.queried_tokens": queried,
            "kvoffload.hit_tokens": hit,
        }
        try:
            context = self._context_of(request.trace_headers)
            name = LOAD if hit else LOOKUP
            self._give(name, since, self.now(), attributes=attributes, context=context)
        except Exception as error:  # noqa: BLE001 - a trace is no reason to do without the tier
            self._works = False
            logger.warning(
                "kvoffload_patch: no more spans of the CPU tier in vLLM's traces: %r; the tier "
                "works on, restart the server to have them again.", error,
            )  # fmt: skip


def spans_of(scheduler: Any) -> Spans | None:
    """Where vLLM's tracing is on, from 0.16 on; None everywhere else, and nothing is imported."""
    config = getattr(getattr(scheduler, "vllm_config", None), "observability_config", None)
    if getattr(config, "otlp_traces_endpoint", None) is None:
        return None
    try:
        return Spans()
    except ImportError:
        return None  # up to 0.15 an engine core has no tracer
