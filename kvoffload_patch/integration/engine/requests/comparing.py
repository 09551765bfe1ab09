"""Which loads are compared with checksums before any step reads them."""

from __future__ import annotations

from kvoffload_patch.integration.engine.requests.loads import LoadBook
from kvoffload_patch.integration.engine.tuning import SAMPLED_LOADS, SAMPLED_PARKED_LOADS
from kvoffload_patch.tier.stats import TierStats

# Of so many loads one is compared if it is parked anyway, and of so many one whatever it is, as
# users choose it.
_COMPARED = {"off": (0, 0), "sample": (SAMPLED_PARKED_LOADS, SAMPLED_LOADS), "full": (1, 1)}


class Comparing:
    """Chooses the loads that are compared. Each of them is parked, which delays its first token.

    Args:
        integrity: what is compared, as the setting has it.
        possible: whether every rank can compare.
        loads: counts those that are begun, and knows whether any has come right.
        stats: of the tier, which count what was wrong.

    Attributes:
        parks: whether loads are parked at all: if none is, none is compared.
        num_compared: loads that were, or are about to be, since start.
    """

    def __init__(self, integrity: str, possible: bool, loads: LoadBook, stats: TierStats) -> None:
        self._parked_every, self._every = _COMPARED[integrity] if possible else (0, 0)
        self._loads, self._stats = loads, stats
        self._last = 0  # loads begun before the last one that was compared
        self.parks = False
        self.num_compared = 0

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

    def parks_next(self) -> bool:
        """Whether the next load is parked only because it is to be compared."""
        return self.active and (self._since() >= self._every or self.all)

    def compares_next(self) -> bool:
        """Whether the next load, which is parked, is compared."""
        return self.active and (self._since() >= self._parked_every or self.all)

    def began(self) -> None:
        """The load that was begun last is compared."""
        self._last = self._begun() - 1
        self.num_compared += 1

    def _begun(self) -> int:
        return self._loads.num_inline + self._loads.num_parked_ever

    def _since(self) -> int:
        return self._begun() - self._last
