"""The tier of one scheduler: what happens to it in a step, from probing to the plan."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from kvoffload_patch.config import Settings
from kvoffload_patch.integration.adapters import PLAN, RESULT, SchedulerView
from kvoffload_patch.integration.hits import HitCounts, UsedHits
from kvoffload_patch.integration.last_block import LastBlocks
from kvoffload_patch.integration.loads import LoadBook
from kvoffload_patch.integration.memo import Known, ProbeMemo
from kvoffload_patch.integration.probe import Found, StandInPool, known_of
from kvoffload_patch.integration.ranks import RankGroup
from kvoffload_patch.integration.recompute import Recompute
from kvoffload_patch.integration.report import Report
from kvoffload_patch.integration.room import Room, Stall
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.plan import TransferPlan, TransferResult

# Requests looked at in a step beyond those that can run: parked ones, and ones that wait for
# something else, are passed over on the way.
_SCAN_MARGIN = 64
# No more loads are begun while the bus has so much to do: beginning one costs the step its time,
# and what is begun holds GPU blocks.
_BUS_AHEAD_MS = 150.0


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
        self._loads = LoadBook(view, manager, ranks.load_ms_per_block)
        mode = settings.load_mode
        self._parks = mode == "parked" or (mode == "auto" and ranks.copies_overlap)
        self._recompute = Recompute(view.scheduler)
        self._last_blocks = LastBlocks(view, manager, self._loads.inline)
        arriving = self._loads.arriving, self._loads.ticket_of
        self._pool = StandInPool(view, manager.lookup, *arriving)
        self._report = Report(manager, settings.log_interval)
        self._hits = HitCounts(view, self._report)
        self._used = UsedHits(view, manager)
        self._scheduling = False
        self._cached: list[tuple[str, int, Hashable]] = []

    # A step, in the order of its events

    def before_schedule(self) -> None:
        """Publish loads that have arrived; begin those that this step can admit.

        `schedule_returned` must follow, whatever happens.
        """
        self._scheduling = True
        self._memo.end_step()  # nothing to do unless `schedule` has raised
        self._used.refresh()
        if self._loads.under_way and (done := self._ranks.loads_done()):
            self._manager.apply(TransferResult(done, stores_done=0))
        for request_id, known in self._loads.finish(len(self._view.scheduler.running)):
            # Unless the tier has got more of it since.
            if not any(map(self._manager.lookup, known.missing)):
                self._memo.put(request_id, known)
        if self._view.has_waiting() and not self._view.is_paused():
            self._probe_waiting()

    def on_cached(self, request: Any, blocks: Iterable[Any]) -> None:
        """These blocks of a request were put into the GPU prefix cache."""
        for block in blocks:
            key = block.block_hash
            if key is None or block.is_null:
                continue
            if self._loads.inline.unproven:
                self._loads.inline.note_cached(block.block_id, key)
            if self._scheduling:
                self._cached.append((request.request_id, block.block_id, key))
            else:
                self._manager.queue_store(key, block.block_id)

    def on_new_blocks(self, blocks: Sequence[Any]) -> None:
        """These GPU blocks were handed out: what they held will be overwritten."""
        gpu_block_ids = [block.block_id for block in blocks]
        self._manager.note_new_blocks(gpu_block_ids)
        self._memo.blocks_reused(gpu_block_ids)

    def schedule_returned(self) -> None:
        """`schedule` has returned or raised."""
        self._view.open_door()

    def after_schedule(self, output: Any) -> None:
        """Put the plan on the output, and give up what was held for this step only."""
        self._scheduling = False
        scheduled = output.num_scheduled_tokens
        for request_id, gpu_block_id, key in self._cached:
            # A request preempted within this very schedule() never computes its blocks.
            if request_id in scheduled:
                self._manager.queue_store(key, gpu_block_id)
        if self._settings.load_mode != "parked":
            self._last_blocks.load(output, self._cached, alone=not self._loads.under_way)
        self._cached.clear()
        readers, decode = self._loads.inline.readers, self._view.decode_tokens
        layerwise = bool(readers) and all(scheduled.get(r, 0) > decode for r in readers)
        self._loads.after_schedule()
        plan = self._manager.make_plan(self._view.still_cached, layerwise)
        if plan is not None:
            setattr(output, PLAN, plan)
        for request_id in self._hits.admitted(scheduled):
            self._memo.forget(request_id)
        self._memo.end_step()
        self._report.tick()

    def on_output(self, scheduled: Any, output: Any) -> None:
        """A step's output has come back; the tokens of a step that went wrong leave it."""
        self.on_result(getattr(output, RESULT, None), getattr(scheduled, PLAN, None))
        self._recompute.drop_tokens(scheduled, output)

    def on_result(self, result: TransferResult | None, plan: TransferPlan | None = None) -> None:
        """The reporting rank says what is done.

        Args:
            result: what it says.
            plan: of the step with whose output it says so.
        """
        failed: tuple[int, ...] = ()
        if result is not None:
            failed = result.failed_loads
            self._memo.keys_stored(self._manager.apply(result))
            if failed:
                self._memo.clear()  # some lookups rest on what has left the tier
        wrong = self._loads.inline.came_back(plan.wait_load if plan else 0, failed)
        if wrong:
            self._void_steps(wrong)

    def _void_steps(self, wrong: Sequence[tuple[int, Hashable]]) -> None:
        """An inline load failed: its step, and those begun since, count as if never run.

        They may have read its blocks, or blocks computed from these, and so may requests that
        are gone by now. What was cached since leaves both caches; every request in flight is
        computed anew from what was cached before, which is all but its newest tokens.
        """
        self._recompute.check()
        still = [b for b, key in wrong if self._view.still_cached(b, key)]
        for _, key in wrong:
            self._manager.discard(key)
        self._view.uncache(still)
        self._recompute.void_steps()

    # Events beside the step

    def on_invalid(self, gpu_block_ids: Iterable[int]) -> None:
        """These GPU blocks do not hold what the prefix cache says; nor do copies of them."""
        for gpu_block_id in gpu_block_ids:
            self._manager.discard(self._view.cached_key(gpu_block_id))

    def is_parked(self, request: Any) -> bool:
        """Whether a request waits for a load of the tier."""
        return self._loads.is_parked(request.request_id)

    def on_finish(self, request_ids: Iterable[str] | None) -> None:
        """These requests (None: all) are about to be finished from outside."""
        if request_ids is None:
            self._loads.abort_all()
            self._memo.clear()
            self._hits.clear()
            return
        for request_id in request_ids:
            self._loads.abort(request_id)
            self._memo.forget(request_id)
            self._hits.forget(request_id)

    def reset(self) -> None:
        """Forget everything; returns when no copy is under way on any rank."""
        if self._manager.busy:
            self._ranks.drain()
            self._manager.apply(self._manager.drained())
        self._loads.drop_all()
        self._manager.clear()
        self._memo.clear()
        self._hits.clear()
        self._used.clear()

    def close(self) -> None:
        """The engine shuts down."""
        self._view.answers.close()
        self._report.flush()
        self._ranks.close()

    # Probing

    def _probe_waiting(self) -> None:
        room = self._loads.room()
        if self._probe_in_order(room):
            return
        if room.admitted or self._view.scheduler.running or self._loads.under_way:
            # What was not looked at must not be admitted without what the tier has for it.
            self._view.close_door(room.admitted)

    def _probe_in_order(self, room: Room) -> bool:
        """Look at waiting requests, and load what they hit; whether all may be admitted."""
        stall = Stall(
            self._ranks.load_ms_per_block,
            self._settings.max_stall_ms,
            len(self._view.scheduler.running) + self._loads.num_parked,
            self._loads.blocks_under_way,
        )
        scans_left = max(0, self._view.free_run_slots()) + _SCAN_MARGIN
        for request in self._view.waiting():
            if scans_left <= 0:
                return True  # What so many others block must not wait for them.
            scans_left -= 1
            if not self._view.is_open(request):
                room.admitted += self._view.goes_on(request)
                continue
            if room.full or room.out_of_tokens(self._parks):
                return False
            if not self._probe(request, room, stall):
                return False
        return True

    def _probe(self, request: Any, room: Room, stall: Stall) -> bool:
        """Look a request up and load what it hits; False if it must wait."""
        known = self._memo.get(request.request_id, request.num_tokens)
        if known is not None and not self._goes(request, known, room):
            return self._pass_over(known, room)
        if known is None or not known.settled:
            found = self._pool.look_up(request, max_cpu_hits=max(1, room.blocks))
            known = known_of(request, found)
            goes = self._goes(request, known, room)
            self._memo.put(request.request_id, known if goes else replace(known, settled=False))
            self._hits.found(request, found, used=goes)
            if not goes:
                return self._pass_over(known, room)
            if self._use(request, found, room, stall):
                return True
        self._loads.protect(known.gpu_blocks)
        self._view.answers.give(known.answer)
        if room.tokens > 0:
            stall.admit()
        room.take(request, known.hit_tokens)
        return True

    def _goes(self, request: Any, known: Known, room: Room) -> bool:
        """Whether a request can be admitted or parked: there is room, and for its load the bus."""
        if known.cpu_hits:
            ahead_ms = self._ranks.load_ms_per_block * self._loads.blocks_under_way
            if ahead_ms > _BUS_AHEAD_MS:
                return False
        return room.fits(request, known.hit_tokens, known.gpu_blocks)

    def _pass_over(self, known: Known, room: Room) -> bool:
        """This request must wait. One without hits vLLM may admit if it finds room after all."""
        room.admitted += not (known.cpu_hits or known.arriving)
        return False

    def _use(self, request: Any, found: Found, room: Room, stall: Stall) -> bool:
        """Load what was found, and keep it; whether the request is parked for that."""
        self._used.note(found.gpu_blocks)
        count = len(found.cpu_hits)
        if count or found.arriving:
            self._memo.forget(request.request_id)
        if found.arriving or (count and not self._inline(count, room, stall)):
            self._loads.park(request, found, room.needed)
            room.park(room.needed)
            stall.add_parked(count)
            return True
        if count:
            self._loads.load_inline(request, found)
            stall.add_inline(count)
        return False

    def _inline(self, num_blocks: int, room: Room, stall: Stall) -> bool:
        """Whether a request loads within this step; if not, it is parked."""
        if not self._parks:
            return True
        if self._settings.load_mode == "parked":
            return False
        return room.tokens > 0 and stall.allows(num_blocks)
