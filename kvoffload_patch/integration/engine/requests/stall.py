"""How long the inline loads of a step may hold its requests up."""

from __future__ import annotations

from enum import Enum

from kvoffload_patch.integration.engine.requests.pace import Pace


class Wait(Enum):
    """What a request must wait for, if anything."""

    NOTHING = "nothing"
    ROOM = "run slots, tokens or blocks"  # those behind it wait as well, as in vLLM
    LOAD = "the bus, or stores of what its load overwrites"  # nobody else waits for that


class Stall:
    """What the inline loads of a step make its requests wait, in milliseconds over all of them.

    Loads cross the bus in the order of their tickets, so an inline load waits for every load
    before it, parked ones included.

    Args:
        pace: how long loads take, for how long the step will not begin, whatever it waits for, and
            how much of a load nobody waits for.
        limit_ms: how long the requests may wait, summed over them.
        requests: those that could compute meanwhile: running ones, and parked ones, which
            cannot be admitted before the step is over.
        blocks_ahead: blocks of loads under way.
        awaited_ms: how long loads still take that this step waits for already; they are no part of
            `blocks_ahead`, and cross before these.
        stalled_ms: how long the step waits for these after the time when it could begin.
    """

    def __init__(
        self,
        pace: Pace,
        limit_ms: float,
        requests: int,
        blocks_ahead: int,
        awaited_ms: float,
        stalled_ms: float,
    ) -> None:
        self._ms_per_block = ms_per_block = pace.ms_per_block
        free_ms = pace.free_ms()
        self._left_ms = limit_ms - requests * stalled_ms
        self._requests = requests
        self._hidden_ms = pace.hidden_ms
        awaited = int(awaited_ms / ms_per_block) if ms_per_block else 0
        self._ahead = blocks_ahead + awaited
        # Blocks that cross before this step can begin, and before it does.
        self._free = free = int(free_ms / ms_per_block) if ms_per_block else 0
        self._waited_for = free
        if stalled_ms and ms_per_block:
            self._waited_for = int((free_ms + stalled_ms) / ms_per_block)

    def allows(self, num_blocks: int) -> bool:
        """Whether a request may load so many blocks inline; `add_inline` then counts it."""
        return self._cost_ms(num_blocks) <= self._left_ms

    def is_long(self, num_blocks: int) -> bool:
        """Whether one that joins the step would wait too long for so many blocks loaded inline.

        Where `allows` says yes, that can be so only if nobody else takes part in the step yet.
        """
        needed = self._ahead + self._needed(num_blocks) - self._waited_for
        return self._ms_per_block * needed > self._left_ms

    def add_inline(self, num_blocks: int) -> float:
        """A request of this step loads so many blocks inline; what that costs, in milliseconds."""
        cost_ms = self._cost_ms(num_blocks)
        self._left_ms -= cost_ms
        self._waited_for = max(self._waited_for, self._ahead + self._needed(num_blocks))
        self._ahead += num_blocks
        return cost_ms

    def add_parked(self, num_blocks: int) -> None:
        """A request is parked for so many blocks of its own."""
        self._ahead += num_blocks
        self._requests += 1

    def admit(self) -> None:
        """One more request computes in this step."""
        self._requests += 1

    def _cost_ms(self, num_blocks: int) -> float:
        # The others wait for what they did not have to wait for so far, this one for the rest.
        added = max(0, self._ahead + self._needed(num_blocks) - self._waited_for)
        ahead = max(0, self._ahead - self._free)
        return self._ms_per_block * (added * self._requests + ahead)

    def _needed(self, num_blocks: int) -> int:
        """How many of so many blocks have to be there when the step begins."""
        if not self._ms_per_block:
            return num_blocks
        return num_blocks - int(self._hidden_ms(num_blocks) / self._ms_per_block)
