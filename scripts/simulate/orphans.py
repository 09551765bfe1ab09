"""How much of a tier is worth nothing for now: blocks whose prefix is in neither cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from scripts.simulate.trace import Request

EVERY_S = 30.0  # the whole trace is walked as often at most, for which only a replay has the time


class Orphans:
    """Looks at tier and GPU now and then, while a trace is replayed.

    A block of the tier is an orphan if a block before it in its prefix is neither in the tier nor
    on the GPU: no request can hit it until that one has been computed again.

    Args:
        trace: whose requests say which block comes before which.
    """

    def __init__(self, trace: Iterable[Request]) -> None:
        self._before: dict[Hashable, Hashable] = {}  # each key behind the one before it
        for request in trace:
            self._before.update(zip(request.keys, (None, *request.keys)))
        self._next = 0.0
        self._orphans = self._blocks = 0

    @property
    def share(self) -> float:
        """Of the blocks that were in the tier, over all looks; 0 if there were none."""
        return self._orphans / max(1, self._blocks)

    def look(
        self,
        now: float,
        in_tier: Callable[[Hashable], bool],
        on_gpu: Callable[[Hashable], bool],
    ) -> None:
        """At this time, in seconds, these say which keys are where."""
        if now < self._next:
            return
        self._next = now + EVERY_S
        whole: set[Hashable] = {None}  # keys that are there with all before them
        for key, before in self._before.items():
            held = in_tier(key)
            self._blocks += held
            if before in whole:
                if held or on_gpu(key):
                    whole.add(key)
            else:
                self._orphans += held
