"""Names of the kinds of engines on a GPU that show a row of `features_rows`, where there are many.

They are those of `tests/engine/gpu_kinds.py`.
"""

from __future__ import annotations

KVCACHED = tuple(
    f"beside kvcached, {how}" for how in ("LRU", "ARC", "ARC, synchronous", "adaptive")
)
BY_RAY = tuple(
    f"by Ray, two {of}"
    for of in (
        "ranks on two nodes",
        "stages on two nodes",
        "ranks, a node lost between requests",
        "ranks, a node lost while it answers",
        "stages, a node lost between requests",
        "stages, a node lost while it answers",
    )
)
_FLIPPED = "all blocks checked", "in a step that does not wait"
FLIPPED = tuple(f"flipped bits, {how}" for how in _FLIPPED)
FLIPPED_APART = tuple(f"flipped bits on another rank, {how}" for how in _FLIPPED)
