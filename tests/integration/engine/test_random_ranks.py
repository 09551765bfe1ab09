"""Random runs with several ranks, always the same ones; `random_ranks.py` plays others."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from integration.engine.random_ranks import describe, run
from integration.engine.seeds import played

# The last: a rank is behind the one that reports, one that nobody hears fails, a load that has
# failed writes late, a rank has not stored what others have. That a rank gives away nothing that it
# could not store: 2019, 2025, 2138.
SEEDS = (*range(2000, 2026), 2033, 2052, 2154, 2104, 2138)


def test_every_rank_computes_upon_the_right_bytes() -> None:
    seen = played(run, SEEDS, describe)
    wanted = ("loaded", "stored", "evicted", "failed loads", "failed stores", "mismatches")
    for name in (*wanted, "resumed", "calls", "ended"):
        assert seen[name], f"no run has {name} anything"
    assert seen["ended"] < len(SEEDS) / 5


def test_the_runs_are_of_all_kinds() -> None:
    shapes = [describe(seed)[0] for seed in SEEDS]
    assert {(s.parts, s.stages) for s in shapes} == {(2, 1), (3, 1), (1, 2), (2, 2)}
    assert {(s.alike, s.board) for s in shapes} == {(a, b) for a in (0, 1) for b in (0, 1)}
    assert {s.integrity for s in shapes} == {"off", "sample", "full"}
    assert {s.grows for s in shapes} == {0, 1, 2}
