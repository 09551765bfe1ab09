"""Random runs over real engines, always the same ones; `scripts/matrix random-engines` has more."""

from __future__ import annotations

from collections import Counter

import pytest
from engine import ways
from engine.random_engines import Models, play
from packaging.version import Version

from scripts.release.installed import version

# Adapters with flipped bits; two ranks, loads within a step; embeddings, windows and new weights.
SEEDS = (4, 24, 749)
SEEN = (
    "stored", "loaded", "evicted", "failed", "parked", "preempted", "aborted within a step",
    "paused with a reset", "slept", "empty", "resize", "set", "adapter", "embeddings",
    "structured", "stop strings", "samples", "prompt_logprobs", "min_tokens", "run: two ranks",
    "run: windows", "weights without a reset",
)  # fmt: skip
pytestmark = [
    pytest.mark.skipif(
        Version(version() or "0") < Version("0.32"),
        reason="what older ones fail at is not left out",
    ),
    pytest.mark.skipif(
        bool(ways.chosen()), reason="what vLLM fails at in other ways is not left out"
    ),
]


def test_answers_are_those_of_plain_vllm_whatever_happens(real):
    models, seen, wrong = Models(real), Counter[str](), {}
    for seed in SEEDS:
        found, differs = play(real, models, seed)
        seen.update(found)
        if differs:
            wrong[seed] = differs
    assert wrong == {}
    for name in SEEN:
        assert seen[name], f"no run has {name} anything"
