"""What the GPU loses in random runs the tier has, always the same; `random_losses.py` has more."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from integration.engine.random_losses import describe, run
from integration.engine.seeds import played

from kvoffload_patch.config import STORES

SEEDS = (*range(12), 72, 102)  # 6, 72, 102: blocks taken from whom the step had scheduled


def test_the_tier_has_what_was_computed_before_the_gpu_loses_it() -> None:
    seen = played(run, SEEDS, describe)
    wanted = ("loaded", "resumed", "brought", "lost", "not computed", *STORES)
    assert not [name for name in wanted if not seen[name]], seen
    assert seen["gone"] > 1500, seen
