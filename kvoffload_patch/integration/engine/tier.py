"""The tier of one scheduler: what happens to it in a step, from probing to the plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from kvoffload_patch.config import Settings
from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView
from kvoffload_patch.integration.engine.blocks.free_front import FreeFront
from kvoffload_patch.integration.engine.blocks.invalid_blocks import InvalidBlocks
from kvoffload_patch.integration.engine.blocks.recency import Recency
from kvoffload_patch.integration.engine.blocks.store_choice import StoreChoice
from kvoffload_patch.integration.engine.blocks.weights import Weights, forget_gpu
from kvoffload_patch.integration.engine.ranks.workers import RankGroup
from kvoffload_patch.integration.engine.reports.metrics import TierCounts
from kvoffload_patch.integration.engine.reports.stats import HitCounts, Report
from kvoffload_patch.integration.engine.requests.admission import Admission
from kvoffload_patch.integration.engine.requests.full_prompt import FullPromptHits
from kvoffload_patch.integration.engine.requests.loads import LoadBook
from kvoffload_patch.integration.engine.requests.lookup import LookupCache
from kvoffload_patch.integration.engine.requests.pace import Pace
from kvoffload_patch.integration.errors import PromiseBroken
from kvoffload_patch.integration.protocol import PLAN, RESULT
from kvoffload_patch.links import LOAD
from kvoffload_patch.plan import TransferPlan, TransferResult
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies import policy_named
from kvoffload_patch.tier.stats import RemovedBy


class SchedulerTier:
    """Stores what the scheduler caches, and loads what its waiting requests could hit.

    Per step it looks at the requests that the step could admit and no further; a request is not
    looked up again until something it could hit has changed.

    Args:
        view: the scheduler.
        manager: slots and tickets.
        ranks: the workers, which carry out the plans.
        settings: of the process.
        now: the clock, in seconds.

    Attributes:
        cached: requests, and blocks put into the GPU prefix cache for each, not yet looked at.
            Within `schedule` they are computed by the step to be scheduled, and between two calls
            they have been computed.
        handed_out: GPU blocks handed out, not yet looked at: what they held will be overwritten.
        events: vLLM's stream of KV cache events, where that is on.
        pace: how long steps and loads take.
        paused: nothing is loaded or stored that was not begun before.
        settings: as given, and as changed since.
        choice: which of the blocks of `cached` are stored.
        weights: whether blocks kept through sleep are still right.
    """

    def __init__(
        self,
        view: SchedulerView,
        manager: OffloadManager,
        ranks: RankGroup,
        settings: Settings,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._manager = manager
        self._ranks = ranks
        self.paused = self._asked_to_pause = False
        self.weights = Weights(ranks, manager)
        self._lookups = LookupCache()
        self._report = Report(manager, settings.log_interval)
        self._hits = HitCounts(view, self._report)
        self.pace = Pace(ranks.load_ms_per_block, ranks.overlap, now)
        front = self._front = FreeFront(view, manager)  # also if eager: it may be told to grow
        told = self._hits.forget, self._look_at_handed_out
        self._invalid = wrong = InvalidBlocks(view, manager)
        self._loads = LoadBook(view, manager, self.pace, *told, wrong.untrusted, ranks.sharing)
        self._full_prompts = FullPromptHits(view, manager, self.pace)
        self._recency = Recency(view, manager, front)
        self.choice = StoreChoice(view, manager, front, self._recency, settings.store_decode)
        how = self._lookups, self._hits, self._recency, front, settings
        self._admission = Admission(view, manager, ranks, self.pace, self._loads, *how)
        self._use(settings)
        self._scheduler = view.scheduler
        self.events = view.kv_events(self._is_needed)
        if self.events is not None:
            manager.on_left = self.events.left
        self._may_admit = False  # nothing is admitted where nothing waits
        self.cached: list[tuple[Any, Sequence[Any]]] = []
        self.handed_out: list[Any] = []

    # A step, in the order of its events

    def before_schedule(self) -> None:
        """Publish loads that have arrived; begin those that this step can admit.

        The scheduler's run limit may be lower than it was, until `schedule_over` of the view.
        """
        self.pace.step_begins()
        if self.weights.doubted and not self._view.is_paused() and self.weights.changed():
            self.empty("weights")
        if self.handed_out:
            self._look_at_handed_out()
        if self._invalid.untrusted:
            self._invalid.take_out()
        if self.cached:
            self._queue_stores(self.cached)
            self.cached.clear()
        if self._recency.used:
            self._recency.refresh()
        self._may_admit = waits = self._view.has_waiting()
        if self._loads.under_way:
            self._may_admit = True
            self._finish_loads()
        if waits and not self.paused and not self._view.is_paused():
            self._admission.look_up_waiting()

    def _finish_loads(self) -> None:
        for request_id, result in self._loads.finish(self._may_wait_ms()):
            # Unless the tier has got more of it since.
            if not any(map(self._manager.lookup, result.missing)):
                self._lookups.put(request_id, result)

    def _may_wait_ms(self) -> float:
        """How soon a load has to be over for the step about to be scheduled to wait for it.

        Until that step can begin nobody waits, and after that all that could compute meanwhile do,
        up to the limit of the stall. 0: for none, as the device is idle, or none may be promised.
        """
        free_ms = self.pace.free_ms() if self._promptly else 0.0
        others = len(self._scheduler.running) + self._loads.num_parked - 1
        return free_ms and free_ms + self._max_stall_ms / max(1, others)

    def _queue_stores(self, cached: Iterable[tuple[Any, Sequence[Any]]]) -> None:
        """The bytes of these blocks are in place."""
        if not self.paused:
            self._queue_offered(self.choice.in_place(cached))

    def _queue_offered(self, computed: Mapping[Hashable, int]) -> None:
        for key, gpu_block_id in self._manager.offer(computed).items():
            self._manager.queue_store(key, gpu_block_id)

    def _look_at_handed_out(self) -> None:
        """Before anything relies on what blocks held that were handed out, and before a plan."""
        gpu_block_ids = [block.block_id for block in self.handed_out]
        self.handed_out.clear()
        self.weights.gpu_empty = False
        self._manager.note_new_blocks(gpu_block_ids)
        self._lookups.blocks_reused(gpu_block_ids)
        self._front.handed_out(gpu_block_ids)
        if self._invalid.untrusted:
            self._invalid.blocks_reused(gpu_block_ids)

    def after_schedule(self, output: Any) -> None:
        """Put the plan on the output, and give up what was held for this step only."""
        self.pace.step_scheduled(output, bool(self._loads.readers or self._loads.awaited_ms))
        if self.handed_out:
            # First: what is queued for a block from here on is what the step computes in it.
            self._look_at_handed_out()
        if self._may_admit or self._view.prefills:
            self._view.note_scheduled(output)
        if self.events is not None:
            self.events.take_in()
        computed = self._computed(output.num_scheduled_tokens) if self.cached else {}
        if self._may_admit:
            self._after_admissions(output)
        if self._scheduler.connector is not None:
            self._invalid.step_scheduled(output, self.cached)
        self.cached.clear()
        self._make_plan(output, computed)
        if output.finished_req_ids:
            # One that was preempted can end by the output of a step that began before that.
            self.on_finish(output.finished_req_ids)
            self._recency.ended(output.finished_req_ids, self.paused)
        self._report.tick()

    def _make_plan(self, output: Any, computed: Mapping[Hashable, int]) -> TransferPlan | None:
        """This step's plan, on its output; nothing is handed out any more before it is made."""
        manager, untrusted = self._manager, self._invalid.untrusted
        leaving: Mapping[Hashable, int] = {}
        if manager.looks_ahead and not self.paused:
            leaving = self._front.look()
            if untrusted:
                for key, gpu_block_id in leaving.items():
                    manager.queue_store(key, gpu_block_id)
                leaving = {}
        trusts = self._invalid.storable if untrusted else self._view.still_cached
        plan = manager.make_plan(trusts, computed, leaving, self.choice.can_wait(len(computed)))
        if plan is not None:  # at once: what fails from here on must not lose its loads
            setattr(output, PLAN, plan)
        return plan

    def _after_admissions(self, output: Any) -> None:
        """Requests may have been admitted: count their hits, give up what was held for them."""
        promptly = self._promptly and not self._admission.comparing.all
        if promptly and output.scheduled_new_reqs and not self.paused:
            alone = not self._loads.under_way
            self._full_prompts.load(output, self.cached, self._loads.readers, alone)
        self._front.held(self._loads.after_schedule())
        self._admission.step_scheduled(output)
        for request_id in self._hits.admitted(output.num_scheduled_tokens):
            self._lookups.forget(request_id)
        self._lookups.end_step()

    def _computed(self, scheduled: Mapping[str, int]) -> dict[Hashable, int]:
        """GPU blocks by the keys that the step computes in them, as far as that needs no check."""
        computed = self.choice.computed(self.cached, scheduled)
        if self.paused:
            self._manager.stats.paused += len(computed)
            return {}
        if self._invalid.untrusted:
            self._queue_offered(computed)
            computed.clear()
        return computed

    def on_output(self, scheduled: Any, output: Any) -> None:
        """A step's output is about to be taken in.

        Raises:
            PromiseBroken: a rank could not carry it out, or it does not say what is done.
        """
        self.pace.step_returned(scheduled)
        if self._scheduler.connector is not None:
            self._invalid.step_returned(scheduled)
        result = getattr(output, RESULT, None)
        if result is None:
            raise PromiseBroken(
                f"kvoffload_patch: expected what is done of the CPU tier's copies on the output of "
                f"each step, found a {type(output).__name__} without it, so requests would wait "
                "for their loads for ever; set KVOFFLOAD_DISABLE=1 to serve without the CPU tier, "
                "and report it with the executor and the model runner in use."
            )
        self.on_result(result)

    def on_result(self, result: TransferResult) -> None:
        """The reporting rank says what is done; one that comes late or twice says nothing new."""
        if failure := self._ranks.step_failure():
            raise PromiseBroken(failure)
        self.pace.by_layer = result.by_layer
        self.pace.loads_take(result.slowdown)
        if readable := self._manager.apply(result):
            self._lookups.keys_stored(readable)
            if self.events is not None:
                # Some may have left by the same result.
                self.events.stored([key for key in readable if self._manager.holds(key)])
        if result.failed and result.failed_on(LOAD):
            self._lookups.clear()  # some lookups rest on what has left the tier

    # Events beside the step

    def on_invalid(self, gpu_block_ids: Collection[int]) -> None:
        """A connector failed to fill these GPU blocks, said before vLLM draws its conclusions."""
        self._invalid.discard(gpu_block_ids)
        self._loads.let_go()
        self._lookups.clear()  # some rest on what has left the tier

    def on_received(self, before: int) -> None:
        """A connector's load has arrived, and vLLM has cached its blocks.

        Their bytes are in place, so they are stored even if this step does not admit their request.

        Args:
            before: length of `cached` before that.
        """
        received = self.cached[before:]
        del self.cached[before:]
        self._queue_stores(received)

    def on_finish(self, request_ids: Iterable[str] | None) -> None:
        """These requests (None: all) are about to be finished from outside."""
        if request_ids is None:
            self._loads.abort_all()
            self._lookups.clear()
            self._hits.clear()
            return
        for request_id in request_ids:
            self._loads.abort(request_id)
            self._lookups.forget(request_id)
            self._hits.forget(request_id)

    def reset(self) -> None:
        """Forget everything, or all but the blocks; returns when no rank has a copy under way."""
        well = (self._ranks.told_of_all and not self._manager.busy) or self._ranks.drain()
        self._manager.apply(self._manager.drained())
        self._loads.drop_all()
        if self.weights.kept_by_reset(self._view.is_at_rest()) and well:
            forget_gpu(self._manager, self.settings.eviction)
        else:
            self.empty("reset")
        self._lookups.clear()
        self._hits.clear()
        self._recency.used.clear()
        self._front.look_again()
        self.cached.clear()
        self.choice.clear()

    def _is_needed(self, key: Hashable) -> bool:
        """Whether anybody has this key, or is about to."""
        known = self._manager.holds(key) or key in self._loads.arriving
        return known or self._view.gpu_lookup()(key) is not None

    # Asked for while the engine serves, between two steps

    def pause(self) -> None:
        """Begin no load and no store any more; what is under way ends."""
        self._asked_to_pause = True
        self._stop()

    def _stop(self) -> None:
        self.paused = True
        self._manager.stats.paused += self._manager.drop_queued()
        self._recency.used.clear()
        self._lookups.clear()
        self._front.look_again()

    def resume(self) -> None:
        """Load and store again. What was computed meanwhile was not stored."""
        self._asked_to_pause = False
        self.paused = self.weights.mixed

    def weights_updated(self) -> None:
        """The ranks were asked to change their weights: what is held is of those before."""
        if not self.settings.empty_on_update:
            return
        self.weights.gpu_empty &= not self.handed_out
        self.empty("weights")
        self._loads.distrust()
        if self.weights.updated():
            self._stop()

    def gpu_emptied(self) -> None:
        """vLLM has reset its prefix cache, before which `reset` was called."""
        self._invalid.clear()
        self._recency.clear()  # not before: vLLM may refuse, and blocks stay what they are
        self._front.clear()
        self.weights.gpu_emptied()
        self.paused = self._asked_to_pause

    def empty(self, reason: RemovedBy = "emptied") -> None:
        """Forget every key. Loads under way are published all the same, if not distrusted."""
        self._manager.clear(reason)
        self._lookups.clear()
        self._front.look_again()
        if self.settings.wipe:
            self._ranks.wipe()

    def resize(self, num_slots: int) -> None:
        """Use so many slots, `RankGroup.num_slots` at most; what does not fit is forgotten."""
        sizing = self._manager.resize(min(num_slots, self._manager.num_slots))
        self._lookups.clear()
        self._front.look_again()
        ready, growing = self._ranks.resize(num_slots, sizing)
        self._manager.apply(TransferResult(num_slots=ready, growing=growing, sizing=sizing))

    def change(self, settings: Settings) -> None:
        """Go on with these settings: any of those that can be changed while an engine serves."""
        if settings.eviction != self.settings.eviction:
            self._manager.change_policy(policy_named(settings.eviction))
        if settings.log_interval != self.settings.log_interval:
            self._report.use(settings.log_interval)
        self._admission.use(settings)
        self._use(settings)

    def _use(self, settings: Settings) -> None:
        self.settings = settings
        self._promptly = settings.load_mode != "parked"  # loads may be promised
        self._max_stall_ms = settings.max_stall_ms
        self._recency.keep_heads(settings.gpu_prefixes == "auto")

    @property
    def gpu_share(self) -> float:
        """Of a prefix that nobody uses, what the GPU keeps, from its head on; 1: all of it."""
        return self._recency.gpu_share

    @property
    def last_step(self) -> float:
        """When a step was last scheduled, on the clock of `time.monotonic`."""
        return self._report.last_step

    def counts(self) -> TierCounts:
        """What was counted since start, and what is so now."""
        report, loads, sizes = self._report, self._loads, self._view.groups.cached_sizes
        begun = report.spared, loads.num_inline, loads.num_parked_ever
        stalled_ms, compared = self._admission.stalled_ms, self._admission.comparing.num_compared
        return TierCounts(
            report.queried, report.hit, *begun, loads.num_parked, sizes, stalled_ms, compared
        )

    def take_parked_times(self) -> list[float]:
        """Seconds that requests were parked for, of those put back since the last call."""
        times = list(self._loads.parked_times)
        self._loads.parked_times.clear()
        return times

    def close(self) -> None:
        """The engine shuts down."""
        self._ranks.close()  # first: a log line that fails keeps no memory
        self._report.flush()
