"""Loads decided on: inline ones, parked ones, and the GPU blocks that they hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

from kvoffload_patch.integration.adapters import SchedulerView
from kvoffload_patch.integration.probe import Found
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
    """A request that waits for a load, its own or another's, and the blocks held for it."""

    __slots__ = ("held", "request", "status")

    def __init__(self, request: Any, status: Any, held: list[Any]) -> None:
        self.request = request
        self.status = status
        self.held = held


class LoadBook:
    """Turns hits into loads and keeps every block involved referenced for as long as needed.

    GPU blocks of an inline load enter the prefix cache at once: the step's forward pass waits
    for the bytes. Those of a parked load enter it when the bytes have arrived. Either way they
    stay referenced until `schedule` has returned, because an allocation within it would
    otherwise evict them.

    Attributes:
        arriving: GPU block and ticket of parked loads under way, by key.
    """

    def __init__(self, view: SchedulerView, manager: OffloadManager) -> None:
        self._view = view
        self._manager = manager
        self.arriving: dict[Hashable, tuple[Any, int]] = {}
        self._arrivals: deque[_Arrival] = deque()
        self._by_ticket: dict[int, _Arrival] = {}
        self._parked: dict[str, _Parked] = {}
        self._held: list[Any] = []
        self._at_risk: list[Sequence[Any]] = []

    @property
    def under_way(self) -> bool:
        """Whether parked loads have not arrived yet."""
        return bool(self._arrivals)

    def protect(self, blocks: Sequence[Any]) -> None:
        """What a request of this step hits on the GPU must survive the loads of those behind it."""
        self._at_risk.append(blocks)

    def load_inline(self, found: Found) -> None:
        """Load what was found so that this very step can use it."""
        self._view.hold(found.gpu_blocks)
        self._held.extend(found.gpu_blocks)
        ticket, blocks = self._begin(found)
        self._held.extend(block for _, block, _ in blocks)
        for key, block, num_tokens in blocks:
            self._view.publish(key, block, num_tokens)
        self._manager.expose_load(ticket)

    def park(self, request: Any, found: Found) -> None:
        """Load what was found while others run, and wait for what others load already."""
        self._view.hold(found.gpu_blocks)
        held = list(found.gpu_blocks)
        ticket = max(found.arriving, default=0)
        if found.cpu_hits:
            ticket, blocks = self._begin(found)
            held.extend(block for _, block, _ in blocks)
            arrival = self._by_ticket[ticket] = _Arrival(ticket, blocks)
            self._arrivals.append(arrival)
            for key, block, _ in blocks:
                self.arriving[key] = (block, ticket)
        parked = _Parked(request, self._view.park(request), held)
        self._parked[request.request_id] = parked
        self._by_ticket[ticket].waiting.append(parked)

    def hold_back(self, request: Any) -> None:
        """Let a request wait for the parked loads before it, because it has no room beside them.

        vLLM does not see the room that parked requests will need, and would admit this one
        now, without what the tier has for it and at the expense of those before it.
        """
        parked = _Parked(request, self._view.park(request), [])
        self._parked[request.request_id] = parked
        self._arrivals[-1].waiting.append(parked)

    def finish(self) -> None:
        """Publish what has arrived, and let the requests that waited for it go on."""
        done: list[_Parked] = []
        while self._arrivals and self._manager.load_done(self._arrivals[0].ticket):
            arrival = self._arrivals.popleft()
            del self._by_ticket[arrival.ticket]
            for key, block, num_tokens in arrival.blocks:
                del self.arriving[key]
                self._view.publish(key, block, num_tokens)
            # Each rank's forward pass waits for its own copy of this load.
            self._manager.expose_load(arrival.ticket)
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
        if self._held:
            held, self._held = self._held, []
            self._view.release(reversed(held))

    def drop_all(self) -> None:
        """Give everything up, published or not. All loads must be done on every rank."""
        waiting = [parked for arrival in self._arrivals for parked in arrival.waiting]
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

    def _let_go(self, done: list[_Parked]) -> None:
        # Put back one by one to the front of the queue, so the last comes first.
        for parked in reversed(done):
            if parked.request is not None:
                del self._parked[parked.request.request_id]
                self._view.unpark(parked.request, parked.status)
            self._held.extend(parked.held)
