"""Inline loads that are not proven yet, and what rests on them.

Blocks of an inline load are in the prefix cache, and are computed upon, before their bytes have
arrived. Whether they did arrive comes back with the output of the step that waited for them, and
outputs come back in order: until then no token of that step has left the scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable

_Cached = tuple[int, Hashable]  # GPU block id, and the key under which it was cached


class _Step:
    """The inline loads of one step, and every block cached since, up to the next of these."""

    __slots__ = ("cached", "last", "tickets")

    def __init__(self) -> None:
        self.tickets: set[int] = set()
        self.last = 0
        self.cached: list[_Cached] = []


class InlineLoads:
    """Remembers what was cached since the first step whose inline loads are not proven.

    Attributes:
        readers: requests for which this step loads inline.
    """

    def __init__(self) -> None:
        self.readers: list[str] = []
        self._steps: deque[_Step] = deque()

    @property
    def unproven(self) -> bool:
        """Whether blocks that are cached now may turn out to be wrong."""
        return bool(self._steps)

    def add(self, ticket: int, request_id: str, cached: Iterable[_Cached]) -> None:
        """This step loads inline for a request."""
        if not self.readers:
            self._steps.append(_Step())
        self.readers.append(request_id)
        step = self._steps[-1]
        step.tickets.add(ticket)
        step.last = ticket
        step.cached.extend(cached)

    def note_cached(self, gpu_block_id: int, key: Hashable) -> None:
        """A block was cached; to be called while anything is unproven."""
        self._steps[-1].cached.append((gpu_block_id, key))

    def end_step(self) -> None:
        """The step is scheduled."""
        self.readers.clear()

    def came_back(self, waited: int, failed: Collection[int]) -> list[_Cached]:
        """A step has come back; returns what may be wrong if loads have failed.

        Args:
            waited: the last load that the step waited for.
            failed: loads that are reported as failed.
        """
        wrong: list[_Cached] = []
        if failed:
            for step in self._steps:
                if wrong or not step.tickets.isdisjoint(failed):
                    step.tickets.difference_update(failed)  # it will be reported again
                    wrong.extend(step.cached)
        while self._steps and self._steps[0].last <= waited:
            self._steps.popleft()
        return wrong
