"""Nobody is worse off with the tier beside a KV connector; `random_beside.py` plays more seeds."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from integration.engine.random_beside import describe, run, run_together
from integration.engine.seeds import played

SEEDS = range(12)
TOGETHER = range(20)


def test_a_tier_and_a_connector_find_no_less_together() -> None:
    seen = played(run, SEEDS, describe)
    for name in ("loaded", "brought", "sent", "waited", "failed"):
        assert seen[name] > 20, f"hardly any run has {name} anything"
    assert seen["computed"] < seen["computed alone"] and seen["brought"] < seen["brought alone"]


def test_requests_that_overlap_are_answered_and_leave_nothing() -> None:
    seen = played(run_together, TOGETHER, describe)
    for name in ("loaded", "brought", "sent", "failed"):
        assert seen[name] > 20, f"hardly any run has {name} anything"
    assert seen["left out"] < len(TOGETHER) / 5
