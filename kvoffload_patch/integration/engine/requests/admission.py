"""Which waiting requests a step looks up, loads for, and lets vLLM admit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from kvoffload_patch.config import Settings
from kvoffload_patch.integration.engine.adapters.vllm_lora import adapters_of
from kvoffload_patch.integration.engine.adapters.vllm_pool import NoBlocks
from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView
from kvoffload_patch.integration.engine.blocks.free_front import FreeFront
from kvoffload_patch.integration.engine.blocks.recency import Recency
from kvoffload_patch.integration.engine.blocks.store_choice import stores
from kvoffload_patch.integration.engine.ranks.workers import RankGroup
from kvoffload_patch.integration.engine.reports.stats import HitCounts
from kvoffload_patch.integration.engine.requests.inline import Comparing, LoadChoice, Stall, Wait
from kvoffload_patch.integration.engine.requests.loads import LoadBook, parks
from kvoffload_patch.integration.engine.requests.lookup import (
    LookupCache,
    LookupResult,
    StandInPool,
)
from kvoffload_patch.integration.engine.requests.pace import Pace
from kvoffload_patch.integration.engine.tuning import (
    BUS_AHEAD_MS,
    LOOK_AHEAD_REQUESTS,
    SCAN_MARGIN_REQUESTS,
)
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies import policy_named


class AdmissionBudget:
    """What this step can still admit, as vLLM will count it.

    The blocks that running requests take first are bounded without a look at each of them; they
    are counted, once, only when the bound leaves it open whether a request fits.

    Args:
        view: the scheduler.
        parked: parked requests, each of which will take a run slot.
        reserved_blocks: blocks that they will need besides those that are held for them.

    Attributes:
        requests: run slots left.
        tokens: of the step that are left.
        blocks: left on the GPU before running requests take theirs.
        admissible: requests that `schedule` may admit so far, parked ones not included.
        adapters: of LoRA, of which a step may have so many; None without.
        reserved: whether some of the room is kept for requests that wait, of which vLLM knows not.
        needed, in_all: blocks that the request asked for last needs; with those that others hold.
        taken: blocks that running requests and those before the next one are given, at most.
    """

    def __init__(self, view: SchedulerView, parked: int = 0, reserved_blocks: int = 0) -> None:
        self._view = view
        self._exact = False
        self.requests = view.free_run_slots() - parked
        tokens, self._for_running = view.demand_of_running()
        self._headroom = self.taken = self._for_running
        self.tokens = int(view.scheduler.max_num_scheduled_tokens) - tokens
        self.blocks = view.num_free_blocks() - reserved_blocks
        self._tokens_for_one = view.prompt_tokens_in_step()
        self._watermark = view.watermark_blocks()
        if view.scheduler.running:
            self._keep_watermark()
        self._ahead = LOOK_AHEAD_REQUESTS
        self.adapters = adapters_of(view.scheduler)
        self.needed = self.in_all = self.admissible = 0
        self.reserved = parked > 0

    @property
    def full(self) -> bool:
        """Whether run slots or blocks are used up."""
        return self.requests <= 0 or self.blocks <= 0

    def out_of_tokens(self, look_ahead: bool) -> bool:
        """Whether no further request is looked up for want of tokens.

        Args:
            look_ahead: whether requests may be parked behind the step's last token, some of them.
        """
        return self.tokens <= 0 and not (look_ahead and self._ahead)

    def has_tokens(self, request: Any, hit_tokens: int) -> bool:
        """Whether `schedule` has tokens for a request: one, or all if it may not split prompts."""
        needed = 1 if self._view.splits_prompts else self._tokens_of(request, hit_tokens)
        return needed <= self.tokens

    def fits(self, request: Any, hit_tokens: int, gpu_blocks: Sequence[Any]) -> bool:
        """Whether there are blocks for a request; `admit` or `reserve` then takes what it needs.

        Run slots are `full`'s: it is asked before any request is looked up.

        Args:
            request: of vLLM.
            hit_tokens: that need not be computed.
            gpu_blocks: that it hits.
        """
        # It may not take in its later steps what is kept for others.
        tokens = int(request.num_tokens)
        if not self.reserved:
            tokens = self._view.tokens_to_fit(request, hit_tokens)
        # vLLM takes slots for those that may be drafted as well.
        tokens += int(self._view.scheduler.num_lookahead_tokens)
        self.needed = self.in_all = self._view.blocks_for(tokens, hit_tokens)
        if self.needed > self.blocks - self._for_running:
            self.needed -= sum(1 for block in gpu_blocks if block.ref_cnt)
        return self.has(self.needed)

    def leaves_headroom(self) -> bool:
        """Whether running requests find a block each besides what `fits` was asked for last.

        If not in this step, each takes one in one of the next, while a load is under way.
        """
        return self.needed <= self.blocks - self._headroom

    def has(self, num_blocks: int) -> bool:
        """Whether so many blocks are left."""
        open_yet = self.blocks - self._for_running < num_blocks <= self.blocks
        if open_yet and not self._exact:
            self._exact = True
            self._for_running = self._view.count_blocks_for_running()
        return num_blocks <= self.blocks - self._for_running

    def admit(self, request: Any, hit_tokens: int) -> None:
        """Admit the request of which `needed` is, as `fits` leaves it."""
        # Beside reserved room it leaves the head-room that it asks for once it runs.
        self._take(self.needed + self._view.decode_blocks * self.reserved)
        if self.adapters is not None:
            self.adapters.admit(request)
        self.admissible += 1
        self.tokens -= self._tokens_of(request, hit_tokens)
        self._keep_watermark()

    def resume(self, request: Any) -> None:
        """`schedule` comes to this request before those behind it, which could take its room."""
        computed = int(request.num_computed_tokens)
        todo = max(0, self._view.tokens_to_fit(request, computed) - computed)
        self.needed = self._view.groups.new_blocks(request, todo)
        self.admit(request, computed)

    def reserve(self, num_blocks: int) -> None:
        """A request waits for a load: it takes blocks and a run slot, but none of the tokens."""
        self.reserved = True
        self._take(num_blocks)

    def pass_over(self) -> None:
        """The request that `fits` was asked for last waits; it keeps its room and head-room."""
        self.reserve(self.needed + self._headroom)
        self._headroom = self._view.decode_blocks  # of this one, beside the next

    def _take(self, num_blocks: int) -> None:
        if self.tokens <= 0:
            self._ahead -= 1
        self.blocks -= num_blocks
        self.taken += num_blocks
        self.requests -= 1

    def _tokens_of(self, request: Any, hit_tokens: int) -> int:
        begins = self._view.groups.computed_from(hit_tokens)
        return min(max(1, int(request.num_tokens) - begins), self._tokens_for_one)

    def _keep_watermark(self) -> None:
        """From the second request on: vLLM leaves these blocks free beside one that runs."""
        self.blocks -= self._watermark
        self._watermark = 0


class Admission:
    """Looks up the requests that a step could admit, and no further.

    Args:
        view: the scheduler.
        manager: of the tier.
        ranks: whether loads run beside the step, or else are inline; whether any are compared.
        pace: how long loads take, and how long they can cross before the step begins.
        loads: where loads are begun.
        cache: lookups that need not be repeated.
        hits: counts what is found.
        recency: keeps what is hit on the GPU recent.
        front: which blocks a load would overwrite.
        settings: of the process.

    Attributes:
        comparing: which loads are compared with checksums.
        stalled_ms: that inline loads were expected to hold requests up since start, over all.
    """

    def __init__(
        self,
        view: SchedulerView,
        manager: OffloadManager,
        ranks: RankGroup,
        pace: Pace,
        loads: LoadBook,
        cache: LookupCache,
        hits: HitCounts,
        recency: Recency,
        front: FreeFront,
        settings: Settings,
    ) -> None:
        self._view = view
        self._loads = loads
        self._cache, self._hits = cache, hits
        self._recency = recency
        self._front = front
        self._pace = pace
        self._copies_overlap = ranks.copies_overlap
        self._choice = LoadChoice(pace)
        self.comparing = Comparing(settings.integrity, ranks.compares, loads, manager.stats)
        self.stalled_ms = 0.0
        self._let_in: Any = None  # the first request that was looked up and may be admitted
        self._stood_still = False
        self._pool = StandInPool(view, manager, loads.arriving, loads.ticket_of)
        self._gpu_alone: StandInPool | None = None  # for those that the tier is not used for
        self.use(settings)

    def use(self, settings: Settings) -> None:
        """Load by these settings from the next step on."""
        self._settings = settings
        self._parks = parks(settings.load_mode, self._copies_overlap)
        self.comparing.use(settings.load_mode)
        self._choice.use(settings)

    def look_up_waiting(self) -> None:
        """Begin the loads of this step, and cap what `schedule` admits if lookups end early."""
        budget = AdmissionBudget(self._view, *self._loads.reserved())
        if self._look_up_in_order(budget):
            return
        if budget.admissible or self._view.scheduler.running or self._loads.under_way:
            # What was not looked up must not be admitted without what the tier has for it.
            self._view.cap_admissions(budget.admissible)

    def step_scheduled(self, output: Any) -> None:
        """`schedule` has returned this output: has it computed nothing, though it could?"""
        first, self._let_in = self._let_in, None
        idle = not (self._view.scheduler.running or self._loads.under_way)
        nothing = idle and first is not None and not output.num_scheduled_tokens
        self._stood_still = nothing and self._view.needs_lookup(first)  # no connector has it

    def _look_up_in_order(self, budget: AdmissionBudget) -> bool:
        """Look waiting requests up, and load what they hit; whether all may be admitted."""
        stall = Stall(
            self._pace,
            self._settings.max_stall_ms,
            len(self._view.scheduler.running) + self._loads.num_parked,
            self._loads.blocks_under_way,
            self._loads.awaited_ms,
            self._loads.stalled_ms,
        )
        # What blocks so many must not keep those behind waiting.
        scans = max(0, self._view.free_run_slots() + SCAN_MARGIN_REQUESTS)
        for request in islice(self._view.waiting(), scans):
            if budget.adapters is not None and budget.adapters.refuse(request):
                continue
            if not self._view.needs_lookup(request):
                if self._view.resumes_without_lookup(request):
                    budget.resume(request)
                continue
            if budget.full or budget.out_of_tokens(self._parks):
                return False
            if not self._look_up(request, budget, stall):
                return False
            if budget.admissible:
                self._let_in = self._let_in or request
                if self._stood_still:
                    # It was not taken, so what is held for others may be what it lacks.
                    return False
        return True

    def _look_up(self, request: Any, budget: AdmissionBudget, stall: Stall) -> bool:
        """Look a request up and load what it hits; False if those behind it must wait."""
        result = self._cache.get(request.request_id, request.num_tokens)
        if result and not result.keys and any(map(self._view.gpu_lookup(), result.missing)):
            result = None  # others have computed some of it, behind which the tier may have more
        wait = Wait.NOTHING if result is None else self._wait(request, result, budget)
        if result is None or not (result.settled or wait != Wait.NOTHING):
            result = self._choice.look_up(self._pool_for(request), request, budget.blocks)
            wait = self._wait(request, result, budget)
            result.deferred = wait != Wait.NOTHING
            self._cache.put(request.request_id, result)
            self._hits.note(request, result)
            if not result.deferred and stores(request):
                self._recency.note(request.request_id, result)
        if wait != Wait.NOTHING:
            return self._defer(request, result, wait, budget)
        if result.keys or result.arriving:
            self._cache.forget(request.request_id)
            try:
                if not self._load(request, result, budget, stall):
                    return True
            except NoBlocks:
                return False
        else:
            self._loads.protect(result, budget.taken)
        if budget.tokens > 0:
            stall.admit()
        budget.admit(request, result.tokens)
        return True

    def _pool_for(self, request: Any) -> StandInPool:
        """What a request may hit: not the tier's blocks, where these may be of other weights."""
        if not self._view.is_stale(request):
            return self._pool
        if self._gpu_alone is None:
            empty = OffloadManager(1, policy_named("lru"))
            self._gpu_alone = StandInPool(self._view, empty, {}, {})
        return self._gpu_alone

    def _load(
        self, request: Any, result: LookupResult, budget: AdmissionBudget, stall: Stall
    ) -> bool:
        """Begin a load; whether it is within this step, or else the request is parked.

        Raises:
            NoBlocks: there are no blocks to load into, whatever was counted.
        """
        compared = bool(result.keys) and self.comparing.compares_next()
        if not compared and self._inline(request, result, budget, stall):
            self._loads.load_inline(request, result)
            self.stalled_ms += stall.add_inline(len(result.keys))
            return True
        self._loads.park(request, result, budget.in_all, compared)
        if compared:
            self.comparing.began()
        budget.reserve(budget.needed)
        stall.add_parked(len(result.keys))
        return False

    def _wait(self, request: Any, result: LookupResult, budget: AdmissionBudget) -> Wait:
        """What a request waits for before it can be admitted or parked: room, and then the bus."""
        if not budget.fits(request, result.tokens, result.gpu_blocks):
            return Wait.ROOM
        if not result.keys:
            return Wait.NOTHING
        if not budget.leaves_headroom():
            return Wait.ROOM
        if not self._parks and not budget.has_tokens(request, result.tokens):
            return Wait.ROOM
        ahead_ms = self._pace.ms_per_block * self._loads.blocks_under_way
        if ahead_ms > BUS_AHEAD_MS or not self._may_overwrite(request, len(result.keys)):
            return Wait.LOAD
        return Wait.NOTHING

    def _may_overwrite(self, request: Any, blocks: int) -> bool:
        """Whether so many blocks can be loaded before others are stored, which takes a step."""
        idle = not (self._view.scheduler.running or self._loads.under_way)
        return idle or self._front.may_overwrite(request.request_id, blocks)

    def _defer(
        self, request: Any, result: LookupResult, wait: Wait, budget: AdmissionBudget
    ) -> bool:
        """A request must wait; False if those behind it must wait as well.

        For the bus only it waits: it keeps its place and its room, and `schedule` passes over it.
        """
        if wait == Wait.LOAD:
            budget.pass_over()
            self._view.pass_over(request)
            return True
        loads = result.keys or result.arriving or result.cut_short
        if not (loads or budget.reserved) and self._keeps(result, budget):
            budget.admissible += 1  # vLLM may find room for it after all
        return False

    def _keeps(self, result: LookupResult, budget: AdmissionBudget) -> bool:
        """Whether what is hit on the GPU is left by those before; held if that leaves them room."""
        free = [block for block in result.gpu_blocks if not block.ref_cnt]
        if budget.has(len(free)):
            self._loads.protect(result, budget.taken)
            return True
        if result.only_given and result.tokens:
            return False  # vLLM would find less of it by itself, of states nothing at all
        return not (budget.admissible and self._loads.is_next(free, budget.taken))

    def _inline(
        self, request: Any, result: LookupResult, budget: AdmissionBudget, stall: Stall
    ) -> bool:
        """Whether a request loads within this step; if not, it is parked."""
        if result.arriving:
            return False
        if not self._parks:
            return True
        if self._settings.load_mode == "parked" or not budget.has_tokens(request, result.tokens):
            return False
        return stall.allows(len(result.keys))
