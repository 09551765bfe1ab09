"""Which waiting requests a step looks up, loads for, and lets vLLM admit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvoffload_patch.config import Settings
from kvoffload_patch.integration.engine.budget import AdmissionBudget
from kvoffload_patch.integration.engine.loads import LoadBook
from kvoffload_patch.integration.engine.lookup import Found, StandInPool, known_of
from kvoffload_patch.integration.engine.lookup_cache import Known, LookupCache
from kvoffload_patch.integration.engine.recency import Recency
from kvoffload_patch.integration.engine.stall import Stall
from kvoffload_patch.integration.engine.stats import HitCounts
from kvoffload_patch.integration.engine.vllm_scheduler import SchedulerView
from kvoffload_patch.tier.manager import OffloadManager

# Requests looked at in a step beyond those that can run: parked ones, and ones that wait for
# something else, are passed over on the way.
_SCAN_MARGIN = 64
# No more loads are begun while the bus has so much to do: beginning one costs the step its time,
# and what is begun holds GPU blocks.
_BUS_AHEAD_MS = 150.0


class Admission:
    """Looks up the requests that a step could admit, and no further.

    Args:
        view: the scheduler.
        manager: of the tier.
        loads: where loads are begun.
        cache: lookups that need not be repeated.
        hits: counts what is found.
        recency: keeps what is hit on the GPU recent.
        settings: of the process.
        load_ms_per_block: time that a block takes to load.
        parks: whether a request can be parked beside the step; otherwise all loads are inline.
    """

    def __init__(
        self,
        view: SchedulerView,
        manager: OffloadManager,
        loads: LoadBook,
        cache: LookupCache,
        hits: HitCounts,
        recency: Recency,
        settings: Settings,
        load_ms_per_block: float,
        parks: bool,
    ) -> None:
        self._view = view
        self._loads = loads
        self._cache = cache
        self._hits = hits
        self._used = recency
        self._settings = settings
        self._load_ms_per_block = load_ms_per_block
        self._parks = parks
        self._pool = StandInPool(view, manager.lookup, loads.arriving, loads.ticket_of)

    def look_up_waiting(self) -> None:
        """Begin the loads of this step, and cap what `schedule` admits if the look ends early."""
        budget = self._loads.budget()
        if self._look_up_in_order(budget):
            return
        if budget.admissible or self._view.scheduler.running or self._loads.under_way:
            # What was not looked at must not be admitted without what the tier has for it.
            self._view.cap_admissions(budget.admissible)

    def _look_up_in_order(self, budget: AdmissionBudget) -> bool:
        """Look at waiting requests, and load what they hit; whether all may be admitted."""
        stall = Stall(
            self._load_ms_per_block,
            self._settings.max_stall_ms,
            len(self._view.scheduler.running) + self._loads.num_parked,
            self._loads.blocks_under_way,
        )
        scans_left = max(0, self._view.free_run_slots()) + _SCAN_MARGIN
        for request in self._view.waiting():
            if scans_left <= 0:
                return True  # What so many others block must not wait for them.
            scans_left -= 1
            if not self._view.needs_lookup(request):
                budget.admissible += self._view.resumes_without_lookup(request)
                continue
            if budget.full or budget.out_of_tokens(self._parks):
                return False
            if not self._look_up(request, budget, stall):
                return False
        return True

    def _look_up(self, request: Any, budget: AdmissionBudget, stall: Stall) -> bool:
        """Look a request up and load what it hits; False if it must wait."""
        known = self._cache.get(request.request_id, request.num_tokens)
        if known is not None and not self._can_start(request, known, budget):
            return self._defer(known, budget)
        if known is None or not known.settled:
            found = self._pool.look_up(request, max_cpu_hits=max(1, budget.blocks))
            known = known_of(request, found)
            goes = self._can_start(request, known, budget)
            self._cache.put(request.request_id, known if goes else replace(known, settled=False))
            self._hits.found(request, found, used=goes)
            if not goes:
                return self._defer(known, budget)
            if self._use(request, found, budget, stall):
                return True
        self._loads.protect(known.gpu_blocks)
        self._view.answers.give(known.answer)
        if budget.tokens > 0:
            stall.admit()
        budget.admit(request, known.hit_tokens)
        return True

    def _can_start(self, request: Any, known: Known, budget: AdmissionBudget) -> bool:
        """Whether a request can be admitted or parked: there is room, and for its load the bus."""
        if known.cpu_hits:
            ahead_ms = self._load_ms_per_block * self._loads.blocks_under_way
            if ahead_ms > _BUS_AHEAD_MS:
                return False
            if not self._parks and not budget.has_tokens(request, known.hit_tokens):
                return False
        return budget.fits(request, known.hit_tokens, known.gpu_blocks)

    def _defer(self, known: Known, budget: AdmissionBudget) -> bool:
        """This request must wait. One without hits vLLM may admit if it finds room after all."""
        budget.admissible += not (known.cpu_hits or known.arriving)
        return False

    def _use(self, request: Any, found: Found, budget: AdmissionBudget, stall: Stall) -> bool:
        """Load what was found, and keep it; whether the request is parked for that."""
        self._used.note(found.gpu_blocks)
        count = len(found.cpu_hits)
        if count or found.arriving:
            self._cache.forget(request.request_id)
        if found.arriving or (count and not self._inline(request, found, budget, stall)):
            self._loads.park(request, found, budget.needed)
            budget.reserve(budget.needed)
            stall.add_parked(count)
            return True
        if count:
            self._loads.load_inline(request, found)
            stall.add_inline(count)
        return False

    def _inline(self, request: Any, found: Found, budget: AdmissionBudget, stall: Stall) -> bool:
        """Whether a request loads within this step; if not, it is parked."""
        if not self._parks:
            return True
        if self._settings.load_mode == "parked":
            return False
        return budget.has_tokens(request, found.tokens) and stall.allows(len(found.cpu_hits))
