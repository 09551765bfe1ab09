"""Loads decided on: inline ones, parked ones, and the GPU blocks that they hold."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any

from kvoffload_patch.integration.engine.adapters.vllm_pool import NoBlocks
from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView
from kvoffload_patch.integration.engine.requests.lookup import LookupResult
from kvoffload_patch.integration.engine.requests.pace import Pace
from kvoffload_patch.integration.engine.tuning import PARKED_TIMES
from kvoffload_patch.tier.manager import OffloadManager


def parks(load_mode: str, copies_overlap: bool) -> bool:
    """Whether loads are parked that are not compared with checksums."""
    return load_mode == "parked" or (load_mode == "auto" and copies_overlap)


class _ParkedLoad:
    """A parked load: GPU blocks to publish, the request that began it, and those that wait.

    ``blocks[i]`` is to hold ``keys[i]``, with which a prefix of ``ends[i]`` tokens ends, about at
    the time ``over_at``. ``compared``: with checksums, so nobody may read it before it is done;
    ``turns``: of the ranks that then compare any of it.
    """

    __slots__ = (
        "blocks", "compared", "ends", "keys", "over_at", "owner", "stale", "ticket", "turns",
        "waiting",
    )  # fmt: skip

    def __init__(
        self,
        ticket: int,
        blocks: list[Any],
        found: LookupResult,
        over_at: float,
        owner: Any,
        compared: bool,
        turns: set[int],
    ) -> None:
        self.compared, self.turns = compared, turns
        self.ticket = ticket
        self.owner = owner
        self.stale = False  # of other weights
        self.over_at = over_at
        self.blocks = blocks
        self.keys, self.ends = found.keys, found.ends
        self.waiting: list[_Parked] = []


class _Parked:
    """A request that waits for a load, its own or another's, and the GPU blocks of its prefix.

    ``needed``: blocks that it will need besides those that are held or loaded for it.
    ``result``: what it hits once its load is done, if that need not be looked up again.
    """

    __slots__ = ("held", "needed", "request", "result", "since")

    def __init__(
        self, request: Any, held: list[Any], needed: int, result: LookupResult | None
    ) -> None:
        self.request = request
        self.held = held
        self.needed = needed
        self.result = result
        self.since = time.monotonic()


class LoadBook:
    """Turns hits into loads and keeps every block involved referenced for as long as needed.

    GPU blocks of an inline load enter the prefix cache at once: the step's forward pass waits
    for the bytes. Those of a parked load enter it when the bytes have arrived, or will before the
    step can begin, or never if the load has failed. Either way they stay referenced until
    `schedule` has returned, because an allocation within it would otherwise evict them.

    Args:
        view: the scheduler.
        manager: slots and tickets.
        pace: when loads will be over.
        not_hit: told of each request whose load failed, so that it is looked up and counted again.
        blocks_taken: called when GPU blocks were taken, on which lookups may rest, and before
            anything is known of what they will hold.
        untrusted: GPU blocks that a KV connector has failed to fill, and those upon them. They
            leave the prefix cache when nobody uses them, so no request that waits holds any.
        sharing: ranks that have slots in common, each of which compares what it has stored.

    Attributes:
        arriving: GPU block of parked loads under way, by key.
        ticket_of: ticket of these loads, by key.
        readers: requests for which this step loads inline.
        under_way: parked loads that are not done yet.
        num_inline, num_parked_ever: requests for which loads were begun, since start.
        parked_times: seconds that requests were parked for, of the last of them.
        awaited_ms: how long the loads still take that were published in this step before they were
            done.
        stalled_ms: how long that step waits for them after the time when it could begin.
    """

    def __init__(
        self,
        view: SchedulerView,
        manager: OffloadManager,
        pace: Pace,
        not_hit: Callable[[str], None],
        blocks_taken: Callable[[], None],
        untrusted: Container[int] = (),
        sharing: int = 1,
    ) -> None:
        self._view = view
        self._manager = manager
        self._pace = pace
        self._not_hit = not_hit
        self._blocks_taken = blocks_taken
        self._untrusted = untrusted
        self.arriving: dict[Hashable, Any] = {}
        self.ticket_of: dict[Hashable, int] = {}
        self.readers: list[str] = []
        self.num_inline = self.num_parked_ever = 0
        self._sharing, self._untried = sharing, set(range(sharing))  # turns
        self.awaited_ms = self.stalled_ms = 0.0
        self.parked_times = deque[float](maxlen=PARKED_TIMES)
        self.under_way: deque[_ParkedLoad] = deque()
        self._by_ticket: dict[int, _ParkedLoad] = {}
        self._parked: dict[str, _Parked] = {}
        self._held: list[Any] = []
        self._at_risk: list[Sequence[Any]] = []
        self._next, self._last_next = set[int](), None  # free blocks, as far as a step has looked

    @property
    def num_parked(self) -> int:
        """Requests that wait for a load."""
        return len(self._parked)

    @property
    def found_right(self) -> bool:
        """Whether every rank has compared any of a load with checksums that was published."""
        return not self._untried

    @property
    def blocks_under_way(self) -> int:
        """Blocks of parked loads that are not done."""
        return len(self.arriving)

    def reserved(self) -> tuple[int, int]:
        """(run slots, blocks) that parked requests will take, besides the blocks held for them."""
        waiting = [p for load in self.under_way for p in load.waiting if p.request]
        return len(waiting), sum(p.needed for p in waiting)

    def protect(self, found: LookupResult, taken: int) -> None:
        """What a request of this step hits on the GPU must survive until vLLM admits it.

        Those before it may be given its blocks, and loads of those behind it as well.

        Args:
            found: what it hits.
            taken: blocks that others are given before it, at most.
        """
        if not (found.search or self.is_next(found.gpu_blocks, taken)):
            self._at_risk.append(found.gpu_blocks)
            return
        self._hold(found.gpu_blocks)
        self._held.extend(found.gpu_blocks)
        self._give(found)

    def is_next(self, blocks: Sequence[Any], count: int) -> bool:
        """Whether one of these may be among the next ``count`` that vLLM hands out.

        A step looks at each free block once at most: where something is held, so are these.
        """
        if self._held or not blocks:
            return bool(blocks)
        if (more := count - len(self._next)) > 0:
            found = self._view.free_after(self._last_next, more)
            self._next.update([block.block_id for block in found])
            self._last_next = found[-1] if found else self._last_next
        return bool(self._next) and not self._next.isdisjoint([b.block_id for b in blocks])

    def _hold(self, blocks: Sequence[Any]) -> None:
        """Keep these from being handed out: others, which may be at risk, would come sooner."""
        self._forget_next()
        for at_risk in self._at_risk:
            self._view.hold(at_risk)
            self._held.extend(at_risk)
        self._at_risk.clear()
        self._view.hold(blocks)

    def _forget_next(self) -> None:
        self._next.clear()
        self._last_next = None

    def load_inline(self, request: Any, found: LookupResult) -> None:
        """Load what was found so that this very step can use it.

        Raises:
            NoBlocks: there are no blocks to load into; what is held is given up with the step.
        """
        self._hold(found.gpu_blocks)
        self._held.extend(found.gpu_blocks)
        ticket, blocks, _ = self._begin(found)
        self._held.extend(blocks)
        self._view.publish(found.keys, found.ends, blocks)
        self._manager.expose_load(ticket)
        self.readers.append(request.request_id)
        self.num_inline += 1
        self._give(found.loaded(blocks))

    def park(self, request: Any, found: LookupResult, needed: int, compared: bool = False) -> None:
        """Load what was found while others run, and wait for what others load already.

        Args:
            request: the request.
            found: what it hits.
            needed: blocks that it needs in all, held ones included.
            compared: what is loaded is compared with checksums.

        Raises:
            NoBlocks: as `load_inline`.
        """
        self._hold(found.gpu_blocks)
        held = list(found.gpu_blocks)
        ticket, result = max(found.arriving, default=0), None
        if found.keys:
            try:
                ticket, blocks, over_at = self._begin(found, compared)
            except NoBlocks:
                self._held.extend(held)
                raise
            self.num_parked_ever += 1
            if not (found.arriving or found.cut_short):
                result = found.loaded(blocks)
            untried = compared and self._untried
            slots = self._manager.loads_to_plan[-1].source_ids if untried else ()
            turns = {slot % self._sharing for slot in slots}  # as `transfer.turns.Turn` has them
            load = _ParkedLoad(ticket, blocks, found, over_at, request, compared, turns)
            self._by_ticket[ticket] = load
            self.under_way.append(load)
            self.arriving.update(zip(found.keys, blocks))
            self.ticket_of.update(dict.fromkeys(found.keys, ticket))
        needed = max(0, needed - len(held) - len(found.keys))
        if self._view.prefix.experts is not None:
            self._view.prefix.experts.loading(request, found.tokens)
        self._view.park(request)
        parked = _Parked(request, held, needed, result)
        self._parked[request.request_id] = parked
        self._by_ticket[ticket].waiting.append(parked)
        self._let_go(parked)

    def finish(self, within_ms: float) -> list[tuple[str, LookupResult]]:
        """Publish the loads that are done, and put the requests that waited back into the queue.

        Args:
            within_ms: a load of which what a step needs at its begin will be there in less counts
                as done; the step about to be scheduled waits for it on the device, and from now on
                it must not fail. 0: none.

        Returns:
            Requests put back, with what they hit.
        """
        done: list[_Parked] = []
        while self.under_way and self._is_done(self.under_way[0], within_ms):
            load = self.under_way.popleft()
            del self._by_ticket[load.ticket]
            self._end(load)
            self._held.extend(load.blocks)
            done += load.waiting
        self._unpark(done)
        ready: list[tuple[str, LookupResult]] = []
        for parked in done:
            if parked.request and parked.result:
                ready.append((parked.request.request_id, parked.result))
                # A connector may have failed to fill some of them meanwhile.
                if None not in [block.block_hash for block in parked.held]:
                    self._give(parked.result)
                parked.result.search = None
        return ready

    def _is_done(self, load: _ParkedLoad, within_ms: float) -> bool:
        if self._manager.load_done(load.ticket):
            return True
        if load.compared:
            return False
        left_ms = self._pace.ms_until(load.over_at)
        needed_ms = left_ms - self._pace.hidden_ms(len(load.blocks))
        if not within_ms or needed_ms >= within_ms:
            return False
        self.awaited_ms = left_ms  # the next ones are later
        self.stalled_ms = max(self.stalled_ms, needed_ms - self._pace.free_ms())
        return True

    def abort(self, request_id: str) -> None:
        """The request goes; a load of its own goes on, and is published when it is done.

        Not where experts of each token are kept for it: vLLM may forget them meanwhile.
        """
        if self._view.prefix.experts is not None:
            for load in self.under_way:
                load.stale |= load.owner.request_id == request_id
        parked = self._parked.pop(request_id, None)
        if parked is not None:
            self._view.unpark([request_id])
            parked.request = None

    def abort_all(self) -> None:
        """Every request goes."""
        for request_id in list(self._parked):
            self.abort(request_id)

    def after_schedule(self) -> list[Any]:
        """`schedule` has returned; what was held is given up, so that it is handed out last."""
        self.awaited_ms = self.stalled_ms = 0.0
        self._at_risk.clear()
        self._forget_next()
        self.readers.clear()
        held, self._held = self._held, []
        if held:
            self._view.release(reversed(held))
        return held

    def distrust(self) -> None:
        """What is under way is of other weights: nothing of it is published."""
        for load in self.under_way:
            load.stale = True

    def let_go(self) -> None:
        """More blocks are untrusted: what holds them is looked up again when its load is done."""
        for load in self.under_way:
            for parked in load.waiting:
                self._let_go(parked)

    def _let_go(self, parked: _Parked) -> None:
        gone = [block for block in parked.held if block.block_id in self._untrusted]
        if gone:
            self._view.release(reversed(gone))
            parked.held = [one for one in parked.held if one.block_id not in self._untrusted]
            parked.result = None
            if parked.request is not None:
                self._not_hit(parked.request.request_id)

    def drop_all(self) -> None:
        """Give everything up. All loads must be done on every rank."""
        loads = list(self.under_way)
        for load in loads:
            # Where calls come beside steps, a rank may begin it yet, and others get its blocks.
            self._manager.await_load(load.ticket)
            self._view.release(reversed(load.blocks))
        self.under_way.clear()
        self._by_ticket.clear()
        self.arriving.clear()
        self.ticket_of.clear()
        self._unpark([parked for load in loads for parked in load.waiting])
        self.after_schedule()

    def _begin(self, found: LookupResult, compared: bool = False) -> tuple[int, list[Any], float]:
        blocks = self._view.take_blocks(len(found.keys))
        self._blocks_taken()
        ids = [block.block_id for block in blocks]
        ticket = self._manager.begin_load(found.keys, ids, compared)
        return ticket, blocks, self._pace.load_begins(len(blocks))

    def _end(self, load: _ParkedLoad) -> None:
        """A parked load is done, or as good as done; or it has failed, or is of other weights."""
        for key in load.keys:
            del self.arriving[key], self.ticket_of[key]
        stale = load.stale or self._view.is_stale(load.owner)
        if self._manager.load_failed(load.ticket) or stale:
            self._manager.await_load(load.ticket)
            self._view.release(reversed(load.blocks))
            load.blocks = []
            for parked in load.waiting:
                parked.result = None
                if parked.request is not None:
                    self._not_hit(parked.request.request_id)
            return
        self._untried -= load.turns
        self._view.publish(load.keys, load.ends, load.blocks)
        # Each rank's forward pass waits for its own copy of this load.
        self._manager.expose_load(load.ticket)

    def _give(self, result: LookupResult) -> None:
        """vLLM need not look up what a request hits: all of it is held until `after_schedule`."""
        search, result.search = result.search, None  # it is vLLM's from now on
        if search is not None:
            self._view.prefix.give(search)

    def _unpark(self, done: list[_Parked]) -> None:
        now = time.monotonic()
        names = [parked.request.request_id for parked in done if parked.request is not None]
        self._view.unpark(names)
        for name in names:
            self.parked_times.append(now - self._parked.pop(name).since)
        for parked in reversed(done):
            self._held.extend(parked.held)
