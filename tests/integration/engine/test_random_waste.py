"""Nothing is moved, lost or counted without need in random runs; `random_waste.py` has more."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("vllm")

from integration.engine.random_waste import run

from kvoffload_patch.config import STORES

SEEDS = (*range(66, 78), 1057)


@pytest.mark.parametrize("store", STORES)
def test_nothing_is_moved_lost_or_counted_without_need(store: str) -> None:
    found, seen = Counter[str](), Counter[str]()
    for seed in SEEDS:
        waste = run(seed, store)
        found.update({f"seed {seed}: {what}": n for what, n in waste.found.items() if n})
        seen.update(waste.seen)
    assert not found
    assert seen["stored"] > 500 and seen["loaded"] > 50 and seen["hit"] > 5000, seen
