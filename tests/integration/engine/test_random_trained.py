"""Weights that change under several ranks; `random_trained.py` plays other seeds."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from integration.engine.random_trained import describe, run
from integration.engine.seeds import played

# Notice what `distrust` is for: 23, 28, 31; the comparison of weights after sleep: 26; a call that
# no rank answers in time: 30.
SEEDS = (0, 3, 5, 7, 12, 22, 23, 26, 28, 30, 31, 36, 37, 40)


def test_no_rank_computes_upon_bytes_of_other_weights() -> None:
    seen = played(run, SEEDS, describe)
    wanted = ("loaded", "stored", "evicted", "resumed", "slept", "kept", "updated", "reset")
    for name in (*wanted, "updated in part", "not waited for", "loads under way"):
        assert seen[name] > 3, f"hardly any run has {name} anything"
    assert 0 < seen["ended"] + seen["detached"] < len(SEEDS) / 2
