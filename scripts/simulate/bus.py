"""A bus with a speed for each direction, on which tickets are carried out in their order."""

from __future__ import annotations

from collections import deque

from kvoffload_patch.links import LOAD, STORE, Link
from kvoffload_patch.plan import Transfer, TransferPlan, TransferResult


class _Direction:
    def __init__(self, seconds_per_block: float) -> None:
        self.seconds_per_block = seconds_per_block
        self.end = 0.0  # of the last transfer
        self.done = 0
        self.moved = 0  # blocks
        self.under_way: deque[tuple[int, float]] = deque()

    def submit(self, transfer: Transfer, at: float) -> None:
        self.end = max(self.end, at) + len(transfer.source_ids) * self.seconds_per_block
        self.moved += len(transfer.source_ids)
        self.under_way.append((transfer.ticket, self.end))

    def done_by(self, now: float) -> int:
        while self.under_way and self.under_way[0][1] <= now:
            self.done = self.under_way.popleft()[0]
        return self.done

    def end_of(self, ticket: int) -> float:
        if ticket <= self.done:
            return 0.0
        return next((end for number, end in self.under_way if number == ticket), 0.0)


class Bus:
    """Both directions, which do not slow each other down.

    Args:
        block_bytes: of one block.
        load_gbs, store_gbs: speed of each direction in GB/s.
    """

    def __init__(self, block_bytes: int, load_gbs: float, store_gbs: float) -> None:
        self._of: dict[Link, _Direction] = {
            LOAD: _Direction(block_bytes / load_gbs / 1e9),
            STORE: _Direction(block_bytes / store_gbs / 1e9),
        }

    def start(self, plan: TransferPlan, now: float) -> float:
        """Submit what goes before the forward pass; returns when that may begin."""
        for transfer in plan.before:
            self._of[LOAD].submit(transfer, now)
        return max([now, *(self._of[link].end_of(ticket) for link, ticket in plan.waits)])

    def finish(self, plan: TransferPlan, now: float) -> None:
        """Submit what goes behind the forward pass, which has ended."""
        for transfer in plan.after:
            self._of[STORE].submit(transfer, now)

    def result(self, now: float) -> TransferResult:
        """What is done."""
        return TransferResult(tuple([(link, way.done_by(now)) for link, way in self._of.items()]))

    def next_load(self) -> float:
        """When the load that is done next is done; infinity without any."""
        under_way = self._of[LOAD].under_way
        return under_way[0][1] if under_way else float("inf")

    def moved(self, link: Link) -> int:
        """Blocks of a direction so far, those under way included."""
        return self._of[link].moved
