"""Loads decided on: inline ones, parked ones, and the GPU blocks that they hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

from kvoffload_patch.integration.adapters import SchedulerView
from kvoffload_patch.integration.inline import InlineLoads
from kvoffload_patch.integration.probe import Found
from kvoffload_patch.integration.room import Room
from kvoffload_patch.tier.manager import OffloadManager

_Blocks = list[tuple[Hashable, Any, int]]  # key, GPU block, tokens of the prefix ending with it


class _Arrival:
    """A parked load: blocks to publish once its ticket is done, and who waits for that."""

    __slots__ = ("blocks", "ticket", "waiting")

    def __init__(self, ticket: int, blocks: _Blocks) -> None:
        self.ticket = ticket
        self.blocks = blocks
        self.waiting: list[_Parked] = []


class _Parked:
    """A request that waits for a load, its own or another's, and the GPU blocks of its prefix.

    ``needed``: blocks that it will need besides those that are held or loaded for it.
    """

    __slots__ = ("held", "needed", "request", "status")

    def __init__(self, request: Any, status: Any, held: list[Any], needed: int) -> None:
        self.request = request
        self.status = status
        self.held = held
        self.needed = needed


class LoadBook:
    """Turns hits into loads and keeps every block involved referenced for as long as needed.

    GPU blocks of an inline load enter the prefix cache at once: the step's forward pass waits
    for the bytes. Those of a parked load enter it when the bytes have arrived, or never if the
    load has failed. Either way they stay referenced until `schedule` has returned, because an
    allocation within it would otherwise evict them.

    Attributes:
        arriving: GPU block and ticket of parked loads under way, by key.
        inline: inline loads that are not known to have arrived.
    """

    def __init__(self, view: SchedulerView, manager: OffloadManager) -> None:
        self._view = view
        self._manager = manager
        self.arriving: dict[Hashable, tuple[Any, int]] = {}
        self.inline = InlineLoads()
        self._arrivals: deque[_Arrival] = deque()
        self._by_ticket: dict[int, _Arrival] = {}
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

    def room(self) -> Room:
        """What the step can admit besides the requests that are parked."""
        waiting = [p for arrival in self._arrivals for p in arrival.waiting if p.request]
        return Room(self._view, len(waiting), sum(p.needed for p in waiting))

    def protect(self, blocks: Sequence[Any]) -> None:
        """What a request of this step hits on the GPU must survive the loads of those behind it."""
        self._at_risk.append(blocks)

    def load_inline(self, request: Any, found: Found) -> None:
        """Load what was found so that this very step can use it."""
        self._view.hold(found.gpu_blocks)
        self._held.extend(found.gpu_blocks)
        ticket, blocks = self._begin(found)
        self._held.extend(block for _, block, _ in blocks)
        for key, block, num_tokens in blocks:
            self._view.publish(key, block, num_tokens)
        self._manager.expose_load(ticket)
        cached = [(block.block_id, key) for key, block, _ in blocks]
        self.inline.add(ticket, request.request_id, cached)

    def park(self, request: Any, found: Found, needed: int) -> None:
        """Load what was found while others run, and wait for what others load already.

        Args:
            request: the request.
            found: what it hits.
            needed: blocks that it needs in all, held ones included.
        """
        self._view.hold(found.gpu_blocks)
        held = list(found.gpu_blocks)
        ticket = max(found.arriving, default=0)
        if found.cpu_hits:
            ticket, blocks = self._begin(found)
            arrival = self._by_ticket[ticket] = _Arrival(ticket, blocks)
            self._arrivals.append(arrival)
            for key, block, _ in blocks:
                self.arriving[key] = (block, ticket)
        needed = max(0, needed - len(held) - len(found.cpu_hits))
        parked = _Parked(request, self._view.park(request), held, needed)
        self._parked[request.request_id] = parked
        self._by_ticket[ticket].waiting.append(parked)

    def finish(self) -> None:
        """Publish what has arrived, and let the requests that waited for it go on."""
        done: list[_Parked] = []
        while self._arrivals and self._manager.load_done(self._arrivals[0].ticket):
            arrival = self._arrivals.popleft()
            del self._by_ticket[arrival.ticket]
            self._end(arrival)
            done.extend(arrival.waiting)
        self._let_go(done)

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
        self.inline.end_step()
        if self._held:
            held, self._held = self._held, []
            self._view.release(reversed(held))

    def drop_all(self) -> None:
        """Give everything up, published or not. All loads must be done on every rank."""
        waiting = [parked for arrival in self._arrivals for parked in arrival.waiting]
        for arrival in self._arrivals:
            self._view.release(block for _, block, _ in reversed(arrival.blocks))
        self._arrivals.clear()
        self._by_ticket.clear()
        self.arriving.clear()
        self._let_go(waiting)
        self.after_schedule()

    def _begin(self, found: Found) -> tuple[int, _Blocks]:
        for at_risk in self._at_risk:
            self._view.hold(at_risk)
            self._held.extend(at_risk)
        self._at_risk.clear()
        blocks = self._view.take_blocks(len(found.cpu_hits))
        keys = [key for key, _ in found.cpu_hits]
        ticket = self._manager.begin_load(keys, [block.block_id for block in blocks])
        return ticket, [(key, b, end) for (key, end), b in zip(found.cpu_hits, blocks)]

    def _end(self, arrival: _Arrival) -> None:
        """A parked load has ended."""
        for key, _, _ in arrival.blocks:
            del self.arriving[key]
        if self._manager.load_failed(arrival.ticket):
            self._view.release(block for _, block, _ in reversed(arrival.blocks))
            return
        for key, block, num_tokens in arrival.blocks:
            self._view.publish(key, block, num_tokens)
        self._held.extend(block for _, block, _ in arrival.blocks)
        # Each rank's forward pass waits for its own copy of this load.
        self._manager.expose_load(arrival.ticket)

    def _let_go(self, done: list[_Parked]) -> None:
        # Put back one by one to the front of the queue, so the last comes first.
        for parked in reversed(done):
            if parked.request is not None:
                del self._parked[parked.request.request_id]
                self._view.unpark(parked.request, parked.status)
            self._held.extend(parked.held)
