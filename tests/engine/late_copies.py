"""Copies that happen as late as the plans allow, on the CPU device.

The CPU device copies at once, which would hide a missing wait: every order is right if nothing is
ever under way. These lanes keep a copy back until the plan makes somebody wait for it, or until
it has been polled a number of times. A wait that is missing shows as a wrong token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvoffload_patch.transfer import copy_engine


class LateLane:
    """Stands in for `HostLane`."""

    patience = 3
    stream = None

    def __init__(self) -> None:
        self._waiting: deque[list] = deque()  # [ticket, copy, polls seen]
        self._done = 0

    def follow_compute(self) -> None:
        """Late copies always come after what was computed when they were submitted."""

    def submit(self, ticket: int, copy: Callable[[], None]) -> None:
        self._waiting.append([ticket, copy, 0])

    def hold(self, stream: object, ticket: int) -> None:
        while self._waiting and self._waiting[0][0] <= ticket:
            self._carry_out()

    def poll(self) -> int:
        for entry in self._waiting:
            entry[2] += 1
        while self._waiting and self._waiting[0][2] > self.patience:
            self._carry_out()
        return self._done

    def drain(self) -> None:
        while self._waiting:
            self._carry_out()

    def _carry_out(self) -> None:
        ticket, copy, _ = self._waiting.popleft()
        copy()
        self._done = ticket


def install(patience: int) -> None:
    """Make every `CopyEngine` of the CPU device built from now on a late one."""
    LateLane.patience = patience
    copy_engine.HostLane = LateLane
