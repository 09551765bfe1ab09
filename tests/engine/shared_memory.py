"""What engines that have ended leave in shared memory, on a machine where others start."""

from __future__ import annotations

import time
from collections.abc import Collection

from scripts.soak.watch import shared_files

LIMIT_S = 60


def files_left(before: Collection[str]) -> set[str]:
    """Files of the tier's that engines have left, which must have ended.

    Other engines have some until all their ranks have opened them. What is made after this call is
    theirs, so it is not looked at.

    Args:
        before: `shared_files` before the engines were started.
    """
    left, until = set(shared_files()).difference(before), time.monotonic() + LIMIT_S
    while left and time.monotonic() < until:
        time.sleep(0.1)
        left.intersection_update(shared_files())
    return left
