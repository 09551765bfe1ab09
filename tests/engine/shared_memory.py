"""What engines that have ended leave in shared memory, on a machine where others end as well."""

from __future__ import annotations

import time
from collections.abc import Collection

from scripts.soak import watch

LIMIT_S = 60


def files_left(before: Collection[str]) -> set[str]:
    """Files of the tier's that engines have left, which must have ended.

    Ranks of other engines that have ended have some until they end, too. What is made after this
    call is theirs, so it is not looked at.

    Args:
        before: `watch.files_left` before the engines were started.
    """
    left, until = set(watch.files_left()).difference(before), time.monotonic() + LIMIT_S
    while left and time.monotonic() < until:
        time.sleep(0.1)
        left.intersection_update(watch.files_left())
    return left
