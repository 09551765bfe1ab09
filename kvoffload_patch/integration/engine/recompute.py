"""Having vLLM compute anew what it computed from wrong blocks."""

from __future__ import annotations

import time
from typing import Any


class Recompute:
    """Voids the steps under way of one scheduler.

    Releases differ: from 0.27 on a request says how many of its tokens are to be dropped; 0.26
    knows that for asynchronous scheduling only, so the tokens are taken out of the outputs.

    Args:
        scheduler: a `vllm.v1.core.sched.scheduler.Scheduler`.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._stale: dict[str, int] = {}  # tokens under way by request; 0.26 only

    def check(self) -> None:
        """Raise if what was computed from wrong blocks has been given to somebody else.

        Raises:
            RuntimeError: a connector may have passed it on, or the release is older than 0.26,
                which does not say what of a request is under way.
        """
        if not _counts_in_flight():
            raise RuntimeError(
                "kvoffload_patch: a load from CPU memory failed in a step that has computed upon "
                "it, expected vLLM 0.26 or newer to compute that step anew, found an older one; "
                "restart the server, and set KVOFFLOAD_LOAD_MODE=parked or KVOFFLOAD_DISABLE=1 "
                "if it happens again."
            )
        for name in ("connector", "aux_output_connector"):
            if getattr(self._scheduler, name, None) is not None:
                raise RuntimeError(
                    "kvoffload_patch: a load from CPU memory failed in a step that has computed "
                    "upon it, expected to compute that step anew, found a connector that may "
                    "have passed its results on; restart the server, and set "
                    "KVOFFLOAD_LOAD_MODE=parked or KVOFFLOAD_DISABLE=1 if it happens again."
                )

    def void_steps(self) -> None:
        """Preempt every running request, and drop every token that is under way.

        As `reset_prefix_cache` does with running requests, but before the output of the oldest
        step under way is taken in: its tokens are dropped, too.
        """
        scheduler, now = self._scheduler, time.monotonic()
        while scheduler.running:  # from the last on, each to the front of the queue
            scheduler._preempt_request(scheduler.running.pop(), now)
        # The runner must be told all of a request that goes on in the very next step.
        scheduler.prev_step_scheduled_req_ids.clear()
        for request_id, request in scheduler.requests.items():
            if not request.num_in_flight_tokens:
                continue
            if hasattr(request, "drop_stale_output"):
                request.num_stale_output_tokens = request.num_in_flight_tokens
                request.drop_stale_output = True
            else:
                self._stale[request_id] = request.num_in_flight_tokens
                request.num_output_placeholders = request.async_tokens_to_discard = 0

    def drop_tokens(self, scheduled: Any, output: Any) -> None:
        """Take out of a step's output what belongs to a voided step, if vLLM does not."""
        if not self._stale:
            return
        for request_id, tokens in scheduled.num_scheduled_tokens.items():
            left = self._stale.pop(request_id, 0)
            if not left:
                continue
            if left > tokens:
                self._stale[request_id] = left - tokens
            index = output.req_id_to_index[request_id]
            if output.sampled_token_ids:
                output.sampled_token_ids[index] = []
            if output.pooler_output:
                output.pooler_output[index] = None
            output.prompt_logprobs_dict.pop(request_id, None)


def _counts_in_flight() -> bool:
    """Whether requests say how many of their tokens are under way, as they do from 0.26 on."""
    from vllm.v1.request import Request

    return "num_in_flight_tokens" in Request.__init__.__code__.co_names
