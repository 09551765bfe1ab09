"""How often blocks were used, so that only those that come back are stored."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping

from kvoffload_patch.tier.tuning import TRACKED_TIMES


class UseCounts:
    """Counts how often each key was computed, or hit on the GPU; those used last are remembered.

    Args:
        least: uses that a block needs before it is stored, 2 or more.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._counts = OrderedDict[Hashable, int]()

    def count(self, keys: Iterable[Hashable], num_slots: int) -> None:
        """These are used once more; the tier has so many slots."""
        counts, least = self._counts, self._least
        for key in keys:
            counts[key] = min(counts.pop(key, 0) + 1, least)
        for _ in range(len(counts) - TRACKED_TIMES * num_slots):
            counts.popitem(last=False)

    def enough(self, blocks: Mapping[Hashable, int]) -> dict[Hashable, int]:
        """Those of these, which are GPU blocks by key, that were used often enough."""
        get, least = self._counts.get, self._least
        return {key: block for key, block in blocks.items() if get(key, 0) >= least}
