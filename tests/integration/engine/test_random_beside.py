"""Nobody is worse off with the tier beside a KV connector; `random_beside.py` plays more seeds."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("vllm")

from integration.engine.random_beside import describe, run, run_together

SEEDS = range(12)
TOGETHER = range(20)


def test_a_tier_and_a_connector_find_no_less_together() -> None:
    seen = Counter[str]()
    for seed in SEEDS:
        try:
            seen += run(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {describe(seed)}") from error
    for name in ("loaded", "brought", "sent", "waited", "failed"):
        assert seen[name] > 20, f"hardly any run has {name} anything"
    assert seen["computed"] < seen["computed alone"] and seen["brought"] < seen["brought alone"]


def test_requests_that_overlap_are_answered_and_leave_nothing() -> None:
    seen = Counter[str]()
    for seed in TOGETHER:
        try:
            seen += run_together(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {describe(seed)}") from error
    for name in ("loaded", "brought", "sent", "failed"):
        assert seen[name] > 20, f"hardly any run has {name} anything"
    assert seen["left out"] < len(TOGETHER) / 5
