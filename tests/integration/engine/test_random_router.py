"""A router predicts what an engine finds, from its KV events alone; `random_router.py` has more."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("vllm")

from integration.engine.random_router import run

SEEDS = (*range(12), 116)


def test_a_router_knows_what_an_engine_finds() -> None:
    found, seen = Counter[str](), Counter[str]()
    for seed in SEEDS:
        oracle = run(seed)
        found.update({f"seed {seed}: {what}": n for what, n in oracle.found.items() if n})
        seen.update(oracle.seen)
    assert not found
    assert seen["any hit"] > seen["GPU hit"] + 500 and seen["detached"] > 0, seen
    assert seen["alone, of the tier"] > 5 and seen["BlockRemoved CPU"] > 500, seen
