"""Whether a hit is loaded, whether within its step, whom that holds up, and if it is compared."""

from __future__ import annotations

from enum import Enum
from typing import Any

from kvoffload_patch.config import Settings
from kvoffload_patch.integration.engine.requests.loads import LoadBook
from kvoffload_patch.integration.engine.requests.lookup import LookupResult, StandInPool
from kvoffload_patch.integration.engine.requests.pace import Pace
from kvoffload_patch.integration.engine.tuning import SAMPLED_LOADS, TRIED_LOADS
from kvoffload_patch.tier.stats import TierStats

# Of so many loads one is compared, as users choose it.
_COMPARED = {"off": 0, "sample": SAMPLED_LOADS, "full": 1}


class Wait(Enum):
    """What a request must wait for, if anything."""

    NOTHING = "nothing"
    ROOM = "run slots, tokens or blocks"  # those behind it wait as well, as in vLLM
    LOAD = "the bus, or stores of what its load overwrites"  # nobody else waits for that


class LoadChoice:
    """Chooses for each hit by what a block takes on the bus lately, and a token to compute.

    Args:
        pace: has measured both.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._chooses, self._computed = True, 0

    def use(self, settings: Settings) -> None:
        """Choose by these settings from the next step on."""
        self._chooses = settings.recompute == "auto"

    def look_up(self, pool: StandInPool, request: Any, max_tier_hits: int) -> LookupResult:
        """What a request is to hit: as `StandInPool.look_up`, or what the GPU has of it alone.

        What loads of others bring is waited for in either case. One hit in `TRIED_LOADS` is loaded
        all the same, or a bus that is fast again would never be noticed.
        """
        result = pool.look_up(request, max_tier_hits=max_tier_hits)
        if not (result.keys and self._chooses):
            return result
        tokens = result.tokens - result.gpu_tokens
        if not self._pace.computes_sooner(tokens, len(result.keys)):
            return result
        self._computed += 1
        if not self._computed % TRIED_LOADS:
            return result
        alone = pool.look_up(request, max_tier_hits=0)
        alone.cut_short = False  # it does not wait for room: nothing more is to be loaded
        alone.spared = result.tokens - alone.tokens
        return alone


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


def parks_compared(load_mode: str) -> bool:
    """Whether a load may be parked to be compared, also where no other one is, as on the CPU.

    A step reads what is loaded within it, so there a mismatch would be found too late.
    """
    return load_mode != "inline"


def in_words(integrity: str, load_mode: str) -> str:
    """Which loads are compared, where every rank has checksums; follows them in the start line."""
    if not parks_compared(load_mode):
        return ", compared with no load, because loads are inline"
    if integrity == "full":
        return ", compared with every load"
    return f", compared with loads until one is right, then with 1 in {_COMPARED[integrity]}"


class Comparing:
    """Chooses the loads that are compared. Each of them is parked, which delays its first token.

    Args:
        integrity: what is compared, as the setting has it.
        possible: whether every rank can compare.
        loads: counts those that are begun, and knows whether any has come right.
        stats: of the tier, which count what was wrong.

    Attributes:
        parks: whether a load may be parked: if none may be, none is compared.
        num_compared: loads that were, or are about to be, since start.
    """

    def __init__(self, integrity: str, possible: bool, loads: LoadBook, stats: TierStats) -> None:
        self._every = _COMPARED[integrity] if possible else 0
        self._loads, self._stats = loads, stats
        self._last = 0  # loads begun before the last one that was compared
        self.parks = False
        self.num_compared = 0

    def use(self, load_mode: str) -> None:
        """Choose among the loads of this mode from now on."""
        self.parks = parks_compared(load_mode)

    @property
    def active(self) -> bool:
        """Whether any load is compared."""
        return self.parks and self._every > 0

    @property
    def all(self) -> bool:
        """Whether every load is compared: until one has come right, and once one was wrong.

        What is always wrong is found that way before a step reads any of it.
        """
        return self.active and (
            not self._loads.found_right or self._stats.mismatches > 0 or self._every == 1
        )

    def compares_next(self) -> bool:
        """Whether the next load is parked, whatever else it would be, and compared."""
        return self.active and (self._since() >= self._every or self.all)

    def began(self) -> None:
        """The load that was begun last is compared."""
        self._last = self._begun() - 1
        self.num_compared += 1

    def _begun(self) -> int:
        return self._loads.num_inline + self._loads.num_parked_ever

    def _since(self) -> int:
        return self._begun() - self._last
