"""Loads do not push running requests into preemption: counted beside plain vLLM."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from scheduler_half import preemptions
from scheduler_half.scenarios import headroom


def test_no_load_preempts_more_than_plain_vllm_does() -> None:
    found = preemptions.compare(range(12))
    assert found["more"] == []
    assert found["beside loads"] == 0
    assert found["plain"] > 100, "requests outgrow the GPU"
    assert found["tier"] < 0.7 * found["plain"]


def test_a_load_leaves_each_running_request_a_block() -> None:
    headroom()
