"""The tier of one scheduler: what happens to it in a step, from probing to the plan."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvoffload_patch.config import Settings
from kvoffload_patch.integration.adapters import PLAN, SchedulerView
from kvoffload_patch.integration.loads import LoadBook
from kvoffload_patch.integration.memo import Known, ProbeMemo
from kvoffload_patch.integration.probe import Found, StandInPool
from kvoffload_patch.integration.ranks import RankGroup
from kvoffload_patch.integration.report import Report
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.plan import TransferResult

# Requests looked at in a step beyond those that can run: parked ones, and ones that wait for
# something else, are passed over on the way.
_SCAN_MARGIN = 64


class _LookedUp(NamedTuple):
    """A request looked up and not admitted yet: tokens that the GPU lacked, and the tier had."""

    request: Any
    queried: int
    hit: int
    used: bool


class _Room:
    """What this step can still admit, as vLLM will count it.

    The blocks that running requests take first are bounded in O(1); they are counted, once,
    only when the bound leaves it open whether a request fits.
    """

    def __init__(self, view: SchedulerView) -> None:
        self._view = view
        self._exact = False
        self.requests = view.free_run_slots()
        self.tokens = view.token_budget()
        self.blocks = view.num_free_blocks() - view.watermark_blocks()
        self._for_running = view.blocks_for_running()
        self._needed = 0

    @property
    def exhausted(self) -> bool:
        """Whether nothing more can be admitted."""
        return self.requests <= 0 or self.tokens <= 0 or self.blocks <= 0

    def fits(self, request: Any, hit_tokens: int, gpu_blocks: Sequence[Any]) -> bool:
        """Whether a request can be admitted; `take` then takes what it needs."""
        needed = self._view.blocks_for(self._view.tokens_to_fit(request, hit_tokens))
        if needed > self.blocks - self._for_running:
            needed -= sum(1 for block in gpu_blocks if block.ref_cnt)
            if not self._exact:
                self._exact = True
                self._for_running = self._view.count_blocks_for_running()
        self._needed = needed
        return needed <= self.blocks - self._for_running

    def take(self, request: Any, hit_tokens: int) -> None:
        """Admit the request that `fits` was asked for last."""
        self.blocks -= self._needed
        self.tokens -= max(1, request.num_tokens - hit_tokens)
        self.requests -= 1


class SchedulerTier:
    """Stores what the scheduler caches, and loads what its waiting requests could hit.

    Per step it looks at the requests that the step could admit and no further; a request is not
    looked up again until something it could hit has changed.

    Args:
        view: the scheduler.
        manager: slots and tickets.
        ranks: the workers, which carry out the plans.
        settings: of the process.
    """

    def __init__(
        self, view: SchedulerView, manager: OffloadManager, ranks: RankGroup, settings: Settings
    ) -> None:
        self._view = view
        self._manager = manager
        self._ranks = ranks
        self._settings = settings
        self._memo = ProbeMemo()
        self._loads = LoadBook(view, manager)
        self._pool = StandInPool(view, manager.lookup, self._loads.arriving)
        self._report = Report(manager, settings.log_interval)
        self._scheduling = False
        self._cached: list[tuple[str, int, Hashable]] = []
        self._looked_up: dict[str, _LookedUp] = {}  # not admitted yet
        view.enable_hit_counts()

    # A step, in the order of its events

    def before_schedule(self) -> None:
        """Publish loads that have arrived; begin those that this step can admit."""
        self._scheduling = True
        self._loads.finish()
        if self._view.has_waiting() and not self._view.is_paused():
            self._probe_waiting()

    def on_cached(self, request: Any, blocks: Iterable[Any]) -> None:
        """These blocks of a request were put into the GPU prefix cache."""
        for block in blocks:
            key = block.block_hash
            if key is None or block.is_null:
                continue
            if self._scheduling:
                self._cached.append((request.request_id, block.block_id, key))
            else:
                self._manager.queue_store(key, block.block_id)

    def on_new_blocks(self, blocks: Sequence[Any]) -> None:
        """These GPU blocks were handed out: what they held will be overwritten."""
        gpu_block_ids = [block.block_id for block in blocks]
        self._manager.note_new_blocks(gpu_block_ids)
        self._memo.blocks_reused(gpu_block_ids)

    def after_schedule(self, output: Any) -> None:
        """Put the plan on the output, and give up what was held for this step only."""
        self._scheduling = False
        scheduled = output.num_scheduled_tokens
        for request_id, gpu_block_id, key in self._cached:
            # A request preempted within this very schedule() never computes its blocks.
            if request_id in scheduled:
                self._manager.queue_store(key, gpu_block_id)
        self._cached.clear()
        self._loads.after_schedule()
        plan = self._manager.make_plan(self._view.still_cached)
        if plan is not None:
            setattr(output, PLAN, plan)
        self._count_admitted(scheduled)
        self._report.tick()

    def on_result(self, result: TransferResult | None) -> None:
        """The reporting rank says what is done."""
        if result is not None:
            self._memo.keys_stored(self._manager.apply(result))

    # Events beside the step

    def on_invalid(self, gpu_block_ids: Iterable[int]) -> None:
        """These GPU blocks do not hold what the prefix cache says; nor do copies of them."""
        for gpu_block_id in gpu_block_ids:
            self._manager.discard(self._view.cached_key(gpu_block_id))

    def on_finish(self, request_ids: Iterable[str] | None) -> None:
        """These requests (None: all) are about to be finished from outside."""
        if request_ids is None:
            self._loads.abort_all()
            self._memo.clear()
            self._looked_up.clear()
            return
        for request_id in request_ids:
            self._loads.abort(request_id)
            self._memo.forget(request_id)
            self._looked_up.pop(request_id, None)

    def reset(self) -> None:
        """Forget everything; returns when no copy is under way on any rank."""
        if self._manager.busy:
            self._ranks.drain()
            self._manager.apply(self._manager.drained())
        self._loads.drop_all()
        self._manager.clear()
        self._memo.clear()
        self._looked_up.clear()

    def close(self) -> None:
        """The engine shuts down."""
        self._report.flush()
        self._ranks.close()

    # Probing

    def _probe_waiting(self) -> None:
        room = _Room(self._view)
        scans_left = room.requests + _SCAN_MARGIN
        for request in self._view.waiting():
            if not scans_left or (room.exhausted and not self._loads.under_way):
                return
            scans_left -= 1
            if self._view.is_open(request) and not self._probe(request, room):
                return

    def _probe(self, request: Any, room: _Room) -> bool:
        """Look a request up and load what it hits; False if none behind it can be admitted."""
        known = self._memo.get(request.request_id, request.num_tokens)
        if known is not None and not room.fits(request, known.hit_tokens, known.gpu_blocks):
            return self._pass_over(request, known.cpu_hits)
        if known is None or not known.settled:
            found = self._pool.look_up(request, max_cpu_hits=max(1, room.blocks))
            fits = room.fits(request, found.tokens, found.gpu_blocks)
            known = self._remember(request, found, fits)
            self._count_found(request, found, fits)
            if not fits:
                return self._pass_over(request, known.cpu_hits)
            self._use(request, found)
        self._loads.protect(known.gpu_blocks)
        room.take(request, known.hit_tokens)
        return True

    def _pass_over(self, request: Any, cpu_hits: int) -> bool:
        """There is no room for this request; whether there may be for one behind it."""
        if cpu_hits and self._loads.under_way:
            self._loads.hold_back(request)
        return self._loads.under_way

    def _use(self, request: Any, found: Found) -> None:
        """Load what was found, and keep it."""
        self._refresh(found)
        if found.cpu_hits or found.arriving:
            self._memo.forget(request.request_id)
        if found.arriving or (found.cpu_hits and not self._inline(len(found.cpu_hits))):
            self._loads.park(request, found)
        elif found.cpu_hits:
            self._loads.load_inline(found)

    def _inline(self, num_blocks: int) -> bool:
        mode = self._settings.load_mode
        if mode != "auto":
            return mode == "inline"
        running = len(self._view.scheduler.running)
        stall_ms = self._ranks.load_ms_per_block * num_blocks * running
        return not self._ranks.copies_overlap or stall_ms <= self._settings.max_stall_ms

    def _refresh(self, found: Found) -> None:
        """Keep what requests hit recent in the tier, and store what it has lost since."""
        keys = [b.block_hash for b in found.gpu_blocks if b.block_hash is not None]
        self._manager.touch(keys)
        for block in found.gpu_blocks:
            if block.block_hash is not None:
                self._manager.queue_store(block.block_hash, block.block_id)

    def _remember(self, request: Any, found: Found, fits: bool) -> Known:
        known = Known(
            num_tokens=request.num_tokens,
            hit_tokens=found.tokens,
            gpu_blocks=tuple(found.gpu_blocks),
            missing=tuple(found.missing),
            cpu_hits=len(found.cpu_hits),
            settled=fits and not (found.cpu_hits or found.arriving or found.cut_short),
        )
        self._memo.put(request.request_id, known)
        return known

    # Counting

    def _count_found(self, request: Any, found: Found, used: bool) -> None:
        """Note, once for each request, what the tier had for it and whether it was used."""
        before = self._looked_up.get(request.request_id)
        if before is None or (used and not before.used):
            beyond_gpu = request.num_tokens - found.gpu_tokens
            hit = found.tokens - found.gpu_tokens if used else 0
            self._looked_up[request.request_id] = _LookedUp(request, beyond_gpu, hit, used)

    def _count_admitted(self, scheduled: Mapping[str, int]) -> None:
        fewer, more = sorted((self._looked_up, scheduled), key=len)
        for request_id in [r for r in fewer if r in more]:
            request, queried, hit, _ = self._looked_up.pop(request_id)
            self._view.count_hit(request, queried, hit)
            self._report.count_hit(queried, hit)
            self._memo.forget(request_id)
