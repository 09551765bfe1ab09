"""Commands at any time lose and count nothing wrongly; `random_control.py` has more."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("vllm")

from integration.engine.random_control import hits, run

SEEDS = range(19, 33)


def test_the_tier_holds_and_tells_what_commands_leave() -> None:
    found, seen = Counter[str](), Counter[str]()
    for seed in SEEDS:
        control = run(seed)
        found.update({f"seed {seed}: {what}": n for what, n in control.found.items() if n})
        seen.update(control.seen)
    assert not found
    assert all(seen[name] > 20 for name in ("pause", "empty", "change", "reset")), seen
    assert seen["told"] > 1000 and seen["fit"] > 200, seen


def test_another_eviction_or_size_loses_no_hit_where_there_is_room() -> None:
    """In the first the GPU loses blocks at once, which lazy stores have to know afterwards."""
    lost = {seed: hits(seed, 0.0) - hits(seed, 0.1) for seed in (26, *range(12))}
    assert not any(lost.values()), lost
