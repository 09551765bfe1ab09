"""Attention over blocks that a step's requests are said to have in common.

Up to 0.31 a scheduler's output says how many blocks all running requests begin with, and a model
runner may read them once, in the first request's block table (cascade attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def read_tables(
    tables: Sequence[list[int]], common: Sequence[list[int]], windows: Sequence[Any]
) -> list[list[int]]:
    """Block tables of a request as attention reads them, of what `common_blocks` has found."""
    return [
        [*begin, *table[len(begin) :]] if begin and window is None else table
        for table, begin, window in zip(tables, common, windows)
    ]


def common_blocks(
    scheduled: Any, computed: Sequence[int], tables: Sequence[Sequence[int]], size: int
) -> list[list[int]]:
    """For each KV cache group, the blocks that every request of a step reads in place of its own.

    Args:
        scheduled: vLLM's `SchedulerOutput`.
        computed: tokens of each request of the step that are in the cache before it.
        tables: the first request's.
        size: tokens of a block.
    """
    said = getattr(scheduled, "num_common_prefix_blocks", None) or [0] * len(tables)
    # No token of the step may see another one of it there, as the runner has it.
    most = min(computed, default=0) // size
    return [list(table[: min(blocks, most)]) for table, blocks in zip(tables, said)]
