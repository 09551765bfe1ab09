"""What the tier's calls take of a step, in an engine whose worker is in the engine's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

# What a step calls of the tier; all that it does for a step is within these.
_CALLS = {
    "SchedulerTier": ("before_schedule", "after_schedule", "on_output"),
    "RankTier": ("begin_step", "end_forward", "end_step"),
}


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
        for owner in (SchedulerTier, RankTier):
            for name in _CALLS[owner.__name__]:
                setattr(owner, name, self._timed(getattr(owner, name), self._add_call))
        self._timed_steps(SchedulerTier)
        CopyQueue.advance = self._timed(CopyQueue.advance, self._add_enqueuing)  # type: ignore[method-assign]

    def begin(self) -> None:
        """Count from now on."""
        self.engine_s = self.enqueuing_s = self.thread_s = 0.0
        self.steps = 0

    def us_a_step(self) -> tuple[float, float, float]:
        """Microseconds a step, in the attributes' order."""
        return tuple(
            1e6 * seconds / max(1, self.steps)
            for seconds in (self.engine_s, self.enqueuing_s, self.thread_s)
        )  # type: ignore[return-value]

    def _timed_steps(self, owner: Any) -> None:
        before = owner.before_schedule

        def counted(tier: Any) -> None:
            self.steps += 1
            before(tier)

        owner.before_schedule = counted

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
