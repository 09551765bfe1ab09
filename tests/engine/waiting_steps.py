"""Steps that the engine waits for, as on a GPU: the CPU device's are over when they are submitted.

Loads run beside steps then, and requests that come meanwhile are seen before vLLM takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LOOKS = 80  # at whether a step is over, until it is; some 10 ms

begun_ahead = 0


def install() -> None:
    """Of all engines that start from now on, here and in processes forked from this one."""
    from kvoffload_patch.integration.engine.loads import LoadBook
    from kvoffload_patch.integration.engine.workers import RankGroup
    from kvoffload_patch.transfer.engine import CopyEngine

    open_ranks, begin_ahead = RankGroup.open, LoadBook.begin_ahead

    def open_overlapping(self: Any, *args: Any) -> None:
        open_ranks(self, *args)
        self.copies_overlap = True

    def count(self: Any, *args: Any) -> None:
        global begun_ahead
        begin_ahead(self, *args)
        begun_ahead += 1

    def mark_end(self: Any) -> Callable[[], bool]:
        left = iter(range(LOOKS))
        return lambda: next(left, None) is None

    RankGroup.open, LoadBook.begin_ahead = open_overlapping, count
    CopyEngine.mark_end = mark_end


def counted(worker: Any) -> int:
    """In the engine's process: loads begun for requests that vLLM had not taken."""
    return begun_ahead
