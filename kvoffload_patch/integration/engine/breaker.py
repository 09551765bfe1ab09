"""The circuit breaker between a scheduler's hooks and its tier: a failure detaches the tier.

Whatever the tier raises ends here. Its loads that no rank knows of yet are carried out, the copies
under way are waited for, and every rank closes its tier, before the next step runs; then whatever
was changed of vLLM's objects is undone, and the engine serves as plain vLLM. So a step gets every
byte that was promised to it. Where that cannot be done, `PromiseBroken` ends the engine.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView
from kvoffload_patch.integration.engine.ranks.workers import RankGroup
from kvoffload_patch.integration.engine.reports.metrics import Reporter
from kvoffload_patch.integration.engine.tier import SchedulerTier
from kvoffload_patch.integration.engine.tuning import (
    FAILED_COPIES,
    FAILED_WINDOW_S,
    TOLD_CHARACTERS,
)
from kvoffload_patch.integration.engine.unsent import refusing, take_unsent
from kvoffload_patch.integration.errors import PromiseBroken
from kvoffload_patch.integration.metrics import ON, PAUSED
from kvoffload_patch.integration.protocol import PLAN, TIER
from kvoffload_patch.patching import ObjectHooks
from kvoffload_patch.tier.manager import OffloadManager

logger = logging.getLogger("vllm.kvoffload_patch")

_RAISED = (
    "vLLM has raised within a step, and its prefix cache may have keys of blocks that nobody has "
    "computed until it is reset"
)


class Breaker:
    """Calls the tier for the hooks of one scheduler, until it fails.

    Inner hooks are called while vLLM changes its queues: they only note a failure, by `failed`. The
    next outer one acts upon it, at the latest when `schedule` returns, before the step runs; until
    then the tier is not called any more. Stores that an inner hook should have waited for are over
    by then, because every rank has been drained.

    Args:
        view: the scheduler.
        manager: of the tier.
        tier: what is called.
        ranks: the workers.
        hooks: of the scheduler and its pool.

    Attributes:
        tier: of the scheduler.
        detached: the tier has failed, or the engine has shut down.
        max_failed_copies: so many within FAILED_WINDOW_S detach the tier.
        reporter: tells the front end what the tier does, if anybody asks.
        asked: what is asked over the control socket; `answer_asked` answers all of it.
        steps_under_way: of how many steps the engine is to take the output in; None: not known.
        failure: why the tier was detached, and what to do, in words; empty if it works, or the
            engine shuts down.
    """

    def __init__(
        self,
        view: SchedulerView,
        manager: OffloadManager,
        tier: SchedulerTier,
        ranks: RankGroup,
        hooks: ObjectHooks,
    ) -> None:
        self.tier = tier
        self.detached = False
        self.max_failed_copies = FAILED_COPIES
        self.reporter: Reporter | None = None
        self.asked = deque[Any]()
        self.answer_asked: Callable[[], None] = self.asked.clear
        self.failure = ""
        self.steps_under_way: Callable[[], int] | None = None
        self._view = view
        view.prefix.failed = self.failed
        if view.part_keys is not None:
            view.part_keys.failed = self.failed
        self._manager = manager
        self._ranks = ranks
        self._hooks = hooks
        self._failure: tuple[str, BaseException] | None = None
        self._depth = 0  # calls of vLLM's that are within ours
        self._failed_copies = 0
        self._failed_at: deque[float] = deque()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a scheduler that has a CPU tier attached cannot be copied or pickled")

    # Outer hooks. Those of each step call the tier themselves: a call of `_call` costs as much.

    def begin_schedule(self) -> bool:
        """Before `schedule`; `end_schedule` or `schedule_raised` follows if it returns true."""
        if self.detached:
            return False
        if self._failure is None:
            try:
                self._check_steps()
                if self.asked and self._failure is None:
                    self.answer_asked()
                if self._failure is None:
                    self.tier.before_schedule()
            except BaseException as error:  # noqa: BLE001 - whatever it is, the engine goes on
                self.failed("before_schedule", error)
        if self._failure is not None:
            self._depth = 0  # no call of vLLM's is within this one, whatever was interrupted
            self._settle()
            if self.detached:
                return False
        self._depth += 1
        return True

    def schedule_raised(self) -> None:
        """`schedule` has raised: no step computes what it cached. The next hook acts upon it."""
        try:
            self._view.schedule_over()
        except BaseException as error:  # noqa: BLE001 - the next hook undoes it
            self.failed("schedule_raised", error)
        self._depth -= 1
        if not self.detached:
            self.failed("step", RuntimeError(_RAISED))

    def end_schedule(self, output: Any) -> None:
        """After `schedule`, before its output goes to the ranks."""
        try:
            self._view.schedule_over()
            if not self.detached:
                self._view.adapter.disclaim(output)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the engine goes on
            self.failed("end_schedule", error)
        self._depth -= 1  # only now: if any of this is interrupted, nobody gets the output
        if self.detached:
            return
        if self._failure is None:
            try:
                if self._view.part_keys is not None:
                    self._view.part_keys.step_over(output.num_scheduled_tokens)
                self.tier.after_schedule(output)
                if self.reporter is not None:
                    self.reporter.planned(getattr(output, PLAN, None))
                return
            except BaseException as error:  # noqa: BLE001 - whatever it is, the engine goes on
                self.failed("after_schedule", error)
        self._settle(output)

    def begin_update(self, scheduled: Any, output: Any) -> None:
        """Before `update_from_output`; `end_update` is to follow."""
        if self._failure is None and not self.detached:
            try:
                self.tier.on_output(scheduled, output)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the engine goes on
                self.failed("on_output", error)
        if self._manager.stats.failed_copies != self._failed_copies:
            self._count_failed_copies()
        if self._failure is not None:
            self._settle()
        self._depth += 1

    def end_update(self) -> None:
        """`update_from_output` has returned or raised."""
        self._depth -= 1

    def answer_if_idle(self) -> None:
        """Carry out what is asked, if no step is under way.

        vLLM aborts requests, and takes an output in, while a later step has computed and waits to
        be sampled from, as with structured outputs: a call of the ranks would come within it.
        """
        if not self._depth and self._failure is None and self.tier.pace.in_flight <= 0:
            self.answer_asked()

    def on_finish(self, request_ids: list[str] | None) -> None:
        """Before `finish_requests` of these requests, or all; or of none, to have it look."""
        if self.asked:
            self.answer_if_idle()
        self._call("on_finish", self.tier.on_finish, request_ids)
        if self._failure is not None:
            # vLLM is about to take them out of the queue that their status names.
            self._view.unpark(request_ids)
        self._settle()

    def reset(self) -> object:
        """Before `reset_prefix_cache`; `reset_over` is to be given what this returns."""
        self._call("reset", self.tier.reset)
        before = self._call("content", self._view.adapter.content)
        self._settle()
        return before

    def reset_over(self, succeeded: bool, before: object) -> None:
        """`reset_prefix_cache` has returned or raised.

        It may have emptied the GPU and have failed by what came after, at a KV connector.
        """
        if not succeeded and self._call("content", self._view.adapter.content) is before:
            return
        self._call("reset_over", self._gpu_emptied)
        self._settle()
        self._tell_state()

    def _gpu_emptied(self) -> None:
        self.tier.gpu_emptied()
        if not self._manager.num_used:  # otherwise it was kept, as through sleep
            self._view.loras.all_forgotten()

    def sleep_begins(self, level: int) -> None:
        """Before vLLM falls asleep; `sleep_over` is to follow."""
        self._call("sleep_begins", self.tier.weights.sleep_begins, level)
        self._settle()

    def sleep_over(self, *_: Any) -> None:
        """vLLM has fallen asleep, or has failed to; the next hook acts upon a failure."""
        self._call("sleep_over", self.tier.weights.sleep_over)

    def weights_updated(self) -> None:
        """The ranks were asked to change their weights."""
        self._call("weights_updated", self.tier.weights_updated)
        self._settle()
        self._tell_state()

    def lora_named(self, lora: Any, to_be_loaded: bool = False) -> None:
        """A request that arrives names a LoRA adapter, or one is about to be loaded."""
        if self.tier.settings.empty_on_update:
            self._call("lora_named", self._view.loras.named, lora, to_be_loaded)
            self._settle()

    @property
    def stale_loras(self) -> list[str]:
        """Names of LoRA adapters that the tier is not used for until the prefix cache is reset."""
        return sorted(self._view.loras.stale)

    # Inner hooks; those of blocks only note what the tier is to look at

    def on_session(self, session: Any) -> None:
        """A streaming session is about to get more input."""
        self._call("mend_session", self._view.mend_session, session)

    def session_went_on(self, session: Any) -> None:
        """A streaming session has got more input."""
        self._call("session_went_on", self.tier.choice.session_went_on, session)

    def on_invalid(self, gpu_block_ids: Any) -> None:
        """Before vLLM handles blocks that a connector did not fill."""
        self._call("on_invalid", self.tier.on_invalid, gpu_block_ids)

    def on_received(self, cache: Callable[[], Any]) -> Any:
        """Have vLLM cache what a connector has received."""
        before = len(self.tier.cached)
        result = cache()
        self._call("on_received", self.tier.on_received, before)
        return result

    def is_parked(self, request: Any) -> bool:
        """Whether a request waits for a load of the tier, which may have failed by now."""
        return self._view.is_parked(request)

    def failed(self, where: str, error: BaseException) -> None:
        """The tier has raised this; it is not called again.

        Raises:
            PromiseBroken: that was it.
            BaseException: what interrupted it, as a key may. Half a change of the tier is none
                that a user who goes on could rely on.
        """
        if isinstance(error, PromiseBroken):
            raise error
        if self._failure is None:
            self._failure = where, error
            self._hooks.live.clear()
        if not isinstance(error, Exception):
            raise error

    # The end

    def close(self) -> None:
        """The engine shuts down; does nothing once the tier is detached."""
        if not self.detached:
            self._take_off()
            try:
                self.tier.close()
            finally:
                self._view.restore()

    def withdraw(self) -> None:
        """Undo everything on vLLM's objects; no copy was ever planned."""
        try:
            self._take_off()
        finally:
            self._view.restore()

    # Inside

    def _check_steps(self) -> None:
        """The output of each step was taken in, or is to be, and each hook has come to its end.

        That is not so where vLLM has raised within one, and who has the engine in the own process
        goes on: with plain vLLM from then on. A plan may be lost, and what was to be computed has
        keys.
        """
        under_way = self.steps_under_way
        lost = under_way is not None and self.tier.pace.in_flight > under_way()
        if lost or self._depth:
            self.failed("step", RuntimeError(_RAISED))

    def _tell_state(self) -> None:
        if self.reporter is not None and not self.detached:
            self.reporter.changed(PAUSED if self.tier.paused else ON, {})

    def _take_off(self) -> None:
        self.detached = True
        self._hooks.remove()
        self._view.scheduler.__dict__.pop(TIER, None)
        self.answer_asked()

    def _call(self, where: str, function: Callable[..., Any], *args: Any) -> Any:
        """What a function of the tier returns; None if it, or one before it, has failed."""
        if self._failure is not None or self.detached:
            return None
        try:
            return function(*args)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the engine goes on
            self.failed(where, error)

    def _count_failed_copies(self) -> None:
        new = self._manager.stats.failed_copies - self._failed_copies
        self._failed_copies += new
        now = time.monotonic()
        failed_at = self._failed_at
        failed_at.extend([now] * new)
        while now - failed_at[0] > FAILED_WINDOW_S:
            failed_at.popleft()
        if len(failed_at) >= self.max_failed_copies:
            text = f"{len(failed_at)} copies have failed within {FAILED_WINDOW_S:.0f} s"
            self.failed("copies", RuntimeError(text))

    def _settle(self, output: Any = None) -> None:
        if self._failure is not None and not self.detached and not self._depth:
            self._detach(*self._failure, output)

    def _detach(self, where: str, cause: BaseException, output: Any) -> None:
        why = f"{where}: {_named(cause)}"
        self.failure = f"{why}; restart the server to have the CPU tier again"
        self._take_off()
        try:
            if output is not None:  # once more: what was to do that may be what has failed
                self._view.adapter.disclaim(output)
            self._ranks.finish(take_unsent(self._manager, output))
            self._view.restore()
        except BaseException as error:  # whatever it is, a step may lack what it needs
            text = (
                f"kvoffload_patch: the CPU tier failed ({why}) and could not be "
                f"detached ({_named(error)}), so a step may lack bytes that were promised to it; "
                "restart the server, or set KVOFFLOAD_DISABLE=1 to serve without it."
            )
            self._view.scheduler.schedule = refusing(text)
            if not isinstance(error, Exception):
                raise
            raise PromiseBroken(text) from cause
        logger.error(
            "kvoffload_patch: the CPU tier failed (%s) and is detached; the engine serves "
            "without it, and what it held is recomputed; restart the server to have it again.",
            why, exc_info=cause,
        )  # fmt: skip
        if self.reporter is not None:
            self.reporter.detached(self.failure)


def _named(error: BaseException) -> str:
    """Its kind and what it says, as much as a label or an answer has room for."""
    text = " ".join(str(error).split())
    text = text if len(text) <= TOLD_CHARACTERS else f"{text[:TOLD_CHARACTERS]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
