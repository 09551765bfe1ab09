"""What the tier's calls take of a step, in an engine whose worker is in the engine's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

# What a step calls of the tier, once each; what its hooks on the block pool note is not in these.
SCHEDULER_CALLS = ("before_schedule", "after_schedule", "on_output")
RANK_CALLS = ("begin_step", "end_forward", "end_step")


class TierCalls:
    """Times the calls of the tier, from when it is made.

    Attributes:
        engine_s: of the thread that makes the steps.
        enqueuing_s: of that, in which copies were enqueued.
        thread_s: in which other threads enqueued copies.
        steps: as many.
    """

    def __init__(self) -> None:
        from kvoffload_patch.integration.engine.tier import SchedulerTier
        from kvoffload_patch.integration.worker.tier import RankTier
        from kvoffload_patch.transfer.queue import CopyQueue

        self.begin()
        for owner, names in ((SchedulerTier, SCHEDULER_CALLS), (RankTier, RANK_CALLS)):
            for name in names:
                add = self._add_step if name == "before_schedule" else self._add_call
                setattr(owner, name, self._timed(getattr(owner, name), add))
        setattr(CopyQueue, "advance", self._timed(CopyQueue.advance, self._add_enqueuing))  # noqa: B010

    def begin(self) -> None:
        """Count from now on."""
        self.engine_s = self.enqueuing_s = self.thread_s = 0.0
        self.steps = 0

    def us_a_step(self) -> tuple[float, float, float]:
        """Microseconds a step, in the attributes' order."""
        us = 1e6 / max(1, self.steps)
        return us * self.engine_s, us * self.enqueuing_s, us * self.thread_s

    def _add_step(self, seconds: float) -> None:
        self.steps += 1
        self._add_call(seconds)

    def _add_call(self, seconds: float) -> None:
        self.engine_s += seconds

    def _add_enqueuing(self, seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            self.enqueuing_s += seconds
        else:
            self.thread_s += seconds

    def _timed(self, call: Any, add: Callable[[float], None]) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                add(time.perf_counter() - began)

        return timed


def tier_took(worker: Any) -> tuple[float, float, float]:
    """In the engine's process: `TierCalls.us_a_step` since the last call."""
    import kvoffload_patch

    calls: TierCalls | None = kvoffload_patch.__dict__.get("_bench_calls")
    if calls is None:
        calls = kvoffload_patch.__dict__["_bench_calls"] = TierCalls()
    found = calls.us_a_step()
    calls.begin()
    return found
