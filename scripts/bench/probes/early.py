"""A trial that is not in the package: loads of requests that vLLM has not taken yet.

A request that arrives while a step runs is looked up, and its load enqueued, when the next step is
scheduled, and the device waits meanwhile (docs/measurements.md, "What a join costs"). Here the
engine's thread does it when it has nothing else to do: when a step has been launched, and while it
waits for the output of the one before. The load is parked, and goes to the rank at once, by a plan
without a step; its request joins the next step as any whose load is under way. One rank in the
engine's process, vLLM 0.26.0's names, asynchronous scheduling.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

from kvoffload_patch.integration.protocol import attached

POLL_S = 0.0002


class EarlyLoads:
    """Begins loads beside steps.

    Args:
        core: vLLM's `EngineCoreProc`, with a tier attached.

    Attributes:
        begun: loads that were begun so.
        looked_up: requests that were taken out of the queue and looked up.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._breaker = attached(core.scheduler)
        self._tier = self._breaker.tier
        self._rank = attached(core.model_executor.driver_worker.worker.model_runner)
        self.begun = self.looked_up = 0

    def look(self) -> bool:
        """Take one request out of the engine's input queue, and begin its load; False: none."""
        queue = self._core.input_queue
        first = queue.queue[0] if queue.queue else None
        if first is None or first[0].name != "ADD" or not self._possible():
            return False
        self._core._handle_client_request(*queue.get_nowait())
        self._begin()
        return True

    def _possible(self) -> bool:
        tier, breaker = self._tier, self._breaker
        off = breaker.detached or breaker._failure is not None or breaker._depth
        if off or tier.paused or tier.cached or tier._invalid.untrusted or breaker.asked:
            return False
        scheduler = self._core.scheduler
        return scheduler.connector is None and not (
            tier._view.is_paused() or tier._view.has_waiting() or tier.weights.doubted
        )

    def _begin(self) -> None:
        """As before and after `schedule`, but for what is computed in a step."""
        tier = self._tier
        if tier.handed_out:
            tier._look_at_handed_out()
        before, admission = tier._loads.num_parked_ever, tier._admission
        admission.__dict__["_inline"] = lambda *_: False
        try:
            admission.look_up_waiting()
        finally:
            del admission.__dict__["_inline"]
            tier._view.schedule_over()
        if tier.handed_out:
            tier._look_at_handed_out()
        tier._loads.after_schedule()
        tier._lookups.end_step()
        self.looked_up += 1
        if tier._loads.num_parked_ever == before:
            return
        self.begun += tier._loads.num_parked_ever - before
        plan = tier._make_plan(SimpleNamespace(), {})
        if plan is not None:
            self._rank._engine.begin_step(plan)
            self._rank._engine.end_step()


def _early() -> EarlyLoads:
    """The one of this process, in which vLLM's engine calls its workers just now."""
    import kvoffload_patch

    found: EarlyLoads | None = kvoffload_patch.__dict__.get("_bench_early")
    if found is None:
        frame: Any = sys._getframe()  # the collector does not list it: vLLM freezes what it makes
        while frame is not None and not hasattr(frame.f_locals.get("self"), "input_queue"):
            frame = frame.f_back
        if frame is None:
            raise RuntimeError("expected vLLM's engine core in a process of its own, found none")
        found = kvoffload_patch.__dict__["_bench_early"] = EarlyLoads(frame.f_locals["self"])
    return found


def changes() -> tuple[tuple[Any, str, Any], ...]:
    """What is replaced in the engine's process, as `switches` has it."""
    from vllm.v1.executor.uniproc_executor import AsyncOutputFuture, UniProcExecutor

    early, sample, result = _early(), UniProcExecutor.sample_tokens, AsyncOutputFuture.result

    def sample_tokens(executor: Any, grammar: Any, non_block: bool = False) -> Any:
        future = sample(executor, grammar, non_block=non_block)
        core = early._core
        if non_block and len(core.batch_queue) + 1 >= core.batch_queue_size:
            early.look()
        return future

    def wait(future: Any, timeout: float | None = None) -> Any:
        output = future.async_output
        event = getattr(output, "copy_event", getattr(output, "async_copy_ready_event", None))
        is_over = getattr(event, "query", None)  # the CPU device has no events
        while is_over is not None and not is_over():
            if not early.look():
                time.sleep(POLL_S)
        return result(future, timeout)

    return (UniProcExecutor, "sample_tokens", sample_tokens), (AsyncOutputFuture, "result", wait)
