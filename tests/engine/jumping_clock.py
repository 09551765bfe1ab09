"""The wall clock is set, by hours and back, each time that it is read."""

from __future__ import annotations

import itertools
import time

_JUMPS_S = (3600.0, -7200.0, 0.0, 86400.0)


def install() -> None:
    """From now on, in this process."""
    as_made, jumps = time.time, itertools.cycle(_JUMPS_S)
    time.time = lambda: as_made() + next(jumps)
    time.time_ns = lambda: int(1e9 * time.time())
