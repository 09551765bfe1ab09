"""What one step can still admit, and what it may still wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvoffload_patch.integration.adapters import SchedulerView

# Requests behind the step's last token for which loads are begun already.
_LOOK_AHEAD = 16


class Room:
    """What this step can still admit, as vLLM will count it.

    The blocks that running requests take first are bounded in O(1); they are counted, once,
    only when the bound leaves it open whether a request fits.

    Args:
        view: the scheduler.
        parked: parked requests, each of which will take a run slot.
        reserved_blocks: blocks that they will need besides those that are held for them.

    Attributes:
        admitted: requests that `schedule` may admit so far, parked ones not included.
        needed: blocks that the request asked for last needs.
    """

    def __init__(self, view: SchedulerView, parked: int = 0, reserved_blocks: int = 0) -> None:
        self._view = view
        self._exact = False
        self.requests = view.free_run_slots() - parked
        self.tokens = view.token_budget()
        self.blocks = view.num_free_blocks() - view.watermark_blocks() - reserved_blocks
        self._ahead = _LOOK_AHEAD
        self._for_running = view.blocks_for_running()
        self.needed = 0
        self.admitted = 0

    @property
    def full(self) -> bool:
        """Whether run slots or blocks are used up."""
        return self.requests <= 0 or self.blocks <= 0

    def out_of_tokens(self, look_ahead: bool) -> bool:
        """Whether `schedule` has no tokens for more; ``look_ahead``: nor shall more be parked."""
        return self.tokens <= 0 and not (look_ahead and self._ahead)

    def fits(self, request: Any, hit_tokens: int, gpu_blocks: Sequence[Any]) -> bool:
        """Whether a request can be admitted; `take` or `park` then takes what it needs."""
        self.needed = self._view.blocks_for(self._view.tokens_to_fit(request, hit_tokens))
        if self.needed > self.blocks - self._for_running:
            self.needed -= sum(1 for block in gpu_blocks if block.ref_cnt)
        return self.requests > 0 and self.has(self.needed)

    def has(self, num_blocks: int) -> bool:
        """Whether so many blocks are left."""
        open_yet = self.blocks - self._for_running < num_blocks <= self.blocks
        if open_yet and not self._exact:
            self._exact = True
            self._for_running = self._view.count_blocks_for_running()
        return num_blocks <= self.blocks - self._for_running

    def take(self, request: Any, hit_tokens: int) -> None:
        """Admit the request that `fits` was asked for last."""
        self.park(self.needed)
        self.admitted += 1
        self.tokens -= max(1, request.num_tokens - hit_tokens)

    def park(self, num_blocks: int) -> None:
        """A request waits for its load: it takes blocks and a run slot, but none of the tokens."""
        if self.tokens <= 0:
            self._ahead -= 1
        self.blocks -= num_blocks
        self.requests -= 1


class Stall:
    """What the inline loads of a step make its requests wait, in milliseconds over all of them.

    Loads cross the bus in the order of their tickets, so an inline load waits for every load
    before it, parked ones included.

    Args:
        ms_per_block: time that a block takes to load.
        limit_ms: how long the requests may wait, summed over them.
        requests: those that could compute meanwhile: running ones, and parked ones, which
            cannot be admitted before the step is over.
        blocks_ahead: blocks of loads under way.
    """

    def __init__(
        self, ms_per_block: float, limit_ms: float, requests: int, blocks_ahead: int
    ) -> None:
        self._ms_per_block = ms_per_block
        self._left_ms = limit_ms
        self._requests = requests
        self._ahead = blocks_ahead
        self._waited_for = 0  # of the blocks ahead, those that this step waits for anyway

    def allows(self, num_blocks: int) -> bool:
        """Whether a request may load so many blocks inline; `add_inline` then counts it."""
        return self._cost_ms(num_blocks) <= self._left_ms

    def add_inline(self, num_blocks: int) -> None:
        """A request of this step loads so many blocks inline."""
        self._left_ms -= self._cost_ms(num_blocks)
        self._ahead += num_blocks
        self._waited_for = self._ahead

    def add_parked(self, num_blocks: int) -> None:
        """A request is parked for so many blocks of its own."""
        self._ahead += num_blocks
        self._requests += 1

    def admit(self) -> None:
        """One more request computes in this step."""
        self._requests += 1

    def _cost_ms(self, num_blocks: int) -> float:
        # The others wait for what they did not have to wait for so far, this one for the rest.
        added = self._ahead + num_blocks - self._waited_for
        return self._ms_per_block * (added * self._requests + self._ahead)
