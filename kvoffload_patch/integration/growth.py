"""Slots that become usable while the engine runs: usable on every rank, or not used."""

from __future__ import annotations

import time
from dataclasses import replace

from kvoffload_patch.integration.ranks import RankGroup
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.plan import TransferResult

# Asking all ranks holds the engine up for as long as a step takes.
_ASK_EVERY_S = 1.0


class AgreedGrowth:
    """Says how far the tier may grow.

    The executor returns one rank's result only, and another rank may have fewer slots, or may
    have failed to get more. With several ranks they are all asked, and only when most of the
    slots known so far are in use, until none of them grows any more.

    Args:
        manager: what grows.
        ranks: who is asked.
    """

    def __init__(self, manager: OffloadManager, ranks: RankGroup) -> None:
        self._manager = manager
        self._ranks = ranks
        self._next = 0.0
        self._over = False  # some rank has fewer for good

    def agreed(self, result: TransferResult) -> TransferResult:
        """One rank's result, with the slots that every rank has."""
        known = self._manager.num_slots
        if self._ranks.num_ranks == 1 or result.num_slots is None or result.num_slots <= known:
            return result
        now = time.monotonic()
        if self._over or now < self._next or self._manager.num_used * 4 < known * 3:
            return replace(result, num_slots=None)
        usable, growing = self._ranks.num_ready()
        self._next = time.monotonic() + _ASK_EVERY_S
        self._over = not growing
        return replace(result, num_slots=min(usable, result.num_slots), growing=growing)
