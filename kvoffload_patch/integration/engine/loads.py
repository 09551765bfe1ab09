"""Loads decided on: inline ones, parked ones, and the GPU blocks that they hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any

from kvoffload_patch.integration.engine.budget import AdmissionBudget
from kvoffload_patch.integration.engine.lookup import Found
from kvoffload_patch.integration.engine.lookup_cache import Known
from kvoffload_patch.integration.engine.lookup_replay import Answer, answer_of
from kvoffload_patch.integration.engine.vllm_scheduler import SchedulerView
from kvoffload_patch.tier.manager import OffloadManager

# With fewer requests running, one that could go on is not held back to join with another one.
_MANY_RUN = 4
# So many join at a time then at most, for whose loads the bus takes so long at most. The step that
# they join takes the host 10 to 40 ms where it is launched call by call.
_JOIN_TOGETHER = 4
_JOIN_MS = 110.0


class _ParkedLoad:
    """A parked load: GPU blocks to publish once its ticket is done, and who waits for that.

    Block ``i`` holds ``keys[i]``, and a prefix of ``ends[i]`` tokens ends with it.
    """

    __slots__ = ("blocks", "ends", "keys", "ticket", "waiting")

    def __init__(self, ticket: int, blocks: list[Any], found: Found) -> None:
        self.ticket = ticket
        self.blocks = blocks
        self.keys = found.cpu_hits
        self.ends = found.cpu_ends
        self.waiting: list[_Parked] = []


class _Parked:
    """A request that waits for a load, its own or another's, and the GPU blocks of its prefix.

    ``needed``: blocks that it will need besides those that are held or loaded for it.
    ``known``: what it hits once its load has arrived, if that need not be looked up again.
    """

    __slots__ = ("held", "known", "needed", "request", "status")

    def __init__(
        self, request: Any, status: Any, held: list[Any], needed: int, known: Known | None
    ) -> None:
        self.request = request
        self.status = status
        self.held = held
        self.needed = needed
        self.known = known


class LoadBook:
    """Turns hits into loads and keeps every block involved referenced for as long as needed.

    GPU blocks of an inline load enter the prefix cache at once: the step's forward pass waits
    for the bytes. Those of a parked load enter it when the bytes have arrived, or never if the
    load has failed. Either way they stay referenced until `schedule` has returned, because an
    allocation within it would otherwise evict them.

    Attributes:
        arriving: GPU block of parked loads under way, by key.
        ticket_of: ticket of these loads, by key.
        readers: requests for which this step loads inline.
    """

    def __init__(
        self, view: SchedulerView, manager: OffloadManager, load_ms_per_block: float
    ) -> None:
        self._view = view
        self._manager = manager
        self._join_blocks = _JOIN_MS / load_ms_per_block if load_ms_per_block else 0.0
        self.arriving: dict[Hashable, Any] = {}
        self.ticket_of: dict[Hashable, int] = {}
        self.readers: list[str] = []
        self._arrivals: deque[_ParkedLoad] = deque()
        self._published: list[_ParkedLoad] = []  # published, their requests still parked
        self._by_ticket: dict[int, _ParkedLoad] = {}
        self._parked: dict[str, _Parked] = {}
        self._held: list[Any] = []
        self._at_risk: list[Sequence[Any]] = []

    @property
    def under_way(self) -> bool:
        """Whether parked loads have not arrived yet."""
        return bool(self._arrivals)

    @property
    def num_parked(self) -> int:
        """Requests that wait for a load."""
        return len(self._parked)

    def is_parked(self, request_id: str) -> bool:
        """Whether a request waits for a load."""
        return request_id in self._parked

    @property
    def blocks_under_way(self) -> int:
        """Blocks of parked loads that have not arrived."""
        return len(self.arriving)

    def budget(self) -> AdmissionBudget:
        """What the step can admit besides the requests that are parked."""
        arrivals = [*self._published, *self._arrivals]
        waiting = [p for arrival in arrivals for p in arrival.waiting if p.request]
        return AdmissionBudget(self._view, len(waiting), sum(p.needed for p in waiting))

    def protect(self, blocks: Sequence[Any]) -> None:
        """What a request of this step hits on the GPU must survive the loads of those behind it."""
        self._at_risk.append(blocks)

    def load_inline(self, request: Any, found: Found) -> None:
        """Load what was found so that this very step can use it."""
        self._view.hold(found.gpu_blocks)
        self._held.extend(found.gpu_blocks)
        ticket, blocks = self._begin(found)
        self._held.extend(blocks)
        self._publish(found.cpu_hits, blocks, found.cpu_ends)
        self._manager.expose_load(ticket)
        self._view.answers.give(_answer(found, blocks))
        self.readers.append(request.request_id)

    def park(self, request: Any, found: Found, needed: int) -> None:
        """Load what was found while others run, and wait for what others load already.

        Args:
            request: the request.
            found: what it hits.
            needed: blocks that it needs in all, held ones included.
        """
        self._view.hold(found.gpu_blocks)
        held = list(found.gpu_blocks)
        ticket, known = max(found.arriving, default=0), None
        if found.cpu_hits:
            ticket, blocks = self._begin(found)
            if not (found.arriving or found.cut_short):
                known = _once_loaded(request, found, blocks)
            arrival = self._by_ticket[ticket] = _ParkedLoad(ticket, blocks, found)
            self._arrivals.append(arrival)
            self.arriving.update(zip(arrival.keys, blocks))
            self.ticket_of.update(dict.fromkeys(arrival.keys, ticket))
        needed = max(0, needed - len(held) - len(found.cpu_hits))
        parked = _Parked(request, self._view.park(request), held, needed, known)
        self._parked[request.request_id] = parked
        self._by_ticket[ticket].waiting.append(parked)

    def finish(self, num_running: int) -> list[tuple[str, Known]]:
        """Publish what has arrived, and let the requests that waited for it go on.

        Args:
            num_running: requests that run. If any does, those that waited go on in the next step:
                the one that they join is the longest on the host, and publishing would come on
                top of it. With many, some join together where the next is soon to come.

        Returns:
            Requests that go on, with what is known of their hits.
        """
        landed, self._published = self._published, []
        while self._arrivals and self._manager.load_done(self._arrivals[0].ticket):
            arrival = self._arrivals.popleft()
            del self._by_ticket[arrival.ticket]
            self._end(arrival)
            (self._published if num_running else landed).append(arrival)
        if num_running >= _MANY_RUN and self._another_comes(landed):
            self._published = landed + self._published
            landed = []
        done = [parked for arrival in landed for parked in arrival.waiting]
        for arrival in landed:
            self._held.extend(arrival.blocks)
        self._let_go(done)
        return [(p.request.request_id, p.known) for p in done if p.request and p.known]

    def _another_comes(self, landed: list[_ParkedLoad]) -> bool:
        """Whether those that have landed are to join together with the next, not to wait for long.

        Where the step that requests join is launched call by call, it holds up all that run.
        """
        following = next(chain(self._published, self._arrivals), None)
        if not 1 <= len(landed) < _JOIN_TOGETHER or following is None:
            return False
        together = len(following.blocks) + sum(len(arrival.blocks) for arrival in landed)
        return len(following.blocks) <= len(landed[0].blocks) and together <= self._join_blocks

    def abort(self, request_id: str) -> None:
        """The request goes; a load of its own goes on, and is published when it is done."""
        parked = self._parked.pop(request_id, None)
        if parked is not None:
            self._view.unpark(parked.request, parked.status)
            parked.request = None

    def abort_all(self) -> None:
        """Every request goes."""
        for request_id in list(self._parked):
            self.abort(request_id)

    def after_schedule(self) -> None:
        """`schedule` has returned: what it admitted holds its own references."""
        self._at_risk.clear()
        self.readers.clear()
        self._view.answers.end_step()
        if self._held:
            held, self._held = self._held, []
            self._view.release(reversed(held))

    def drop_all(self) -> None:
        """Give everything up, published or not. All loads must be done on every rank."""
        arrivals = [*self._published, *self._arrivals]
        for arrival in arrivals:
            self._view.release(reversed(arrival.blocks))
        self._published.clear()
        self._arrivals.clear()
        self._by_ticket.clear()
        self.arriving.clear()
        self.ticket_of.clear()
        self._let_go([parked for arrival in arrivals for parked in arrival.waiting])
        self.after_schedule()

    def _begin(self, found: Found) -> tuple[int, list[Any]]:
        for at_risk in self._at_risk:
            self._view.hold(at_risk)
            self._held.extend(at_risk)
        self._at_risk.clear()
        blocks = self._view.take_blocks(len(found.cpu_hits))
        gpu_block_ids = [block.block_id for block in blocks]
        return self._manager.begin_load(found.cpu_hits, gpu_block_ids), blocks

    def _publish(self, keys: Sequence[Hashable], blocks: Sequence[Any], ends: list[int]) -> None:
        publish = self._view.publish
        for key, block, num_tokens in zip(keys, blocks, ends):
            publish(key, block, num_tokens)

    def _end(self, arrival: _ParkedLoad) -> None:
        """A parked load has ended."""
        for key in arrival.keys:
            del self.arriving[key], self.ticket_of[key]
        if self._manager.load_failed(arrival.ticket):
            self._manager.await_load(arrival.ticket)
            self._view.release(reversed(arrival.blocks))
            arrival.blocks = []
            for parked in arrival.waiting:
                parked.known = None
            return
        self._publish(arrival.keys, arrival.blocks, arrival.ends)
        # Each rank's forward pass waits for its own copy of this load.
        self._manager.expose_load(arrival.ticket)

    def _let_go(self, done: list[_Parked]) -> None:
        # Put back one by one to the front of the queue, so the last comes first.
        for parked in reversed(done):
            if parked.request is not None:
                del self._parked[parked.request.request_id]
                self._view.unpark(parked.request, parked.status)
            self._held.extend(parked.held)


def _once_loaded(request: Any, found: Found, loaded: Sequence[Any]) -> Known:
    """What a request hits when its blocks have been loaded; they stay referenced until then."""
    return Known(
        num_tokens=request.num_tokens,
        hit_tokens=found.tokens,
        gpu_blocks=(*found.gpu_blocks, *loaded),
        missing=tuple(found.missing),
        answer=_answer(found, loaded),
    )


def _answer(found: Found, loaded: Sequence[Any]) -> Answer | None:
    """What vLLM finds once the blocks are loaded."""
    return answer_of(found.lookup, found.not_on_gpu, dict(zip(found.cpu_hits, loaded)))
