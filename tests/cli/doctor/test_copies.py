"""What the speed of copies means, and which child is asked."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload_patch.cli.doctor import copies

FAST = {"gpu": "H200", "to_cpu": 55.0, "to_gpu": 55.2}


@pytest.mark.parametrize(("gpu", "word"), [(True, "gpu"), (False, "memory")])
def test_the_gpu_is_measured_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, word: str
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(copies, "ask", lambda *a, **k: asked.append((a, k)) or {"memory": 9.0})
    copies.check(gpu)
    assert f"main({word!r})" in asked[0][0][0]
    assert asked[0][1] == {"KVOFFLOAD_DISABLE": "1"}, "nothing is patched to measure"


@pytest.mark.parametrize(
    ("found", "text", "problem"),
    [
        (FAST, "55.2 GB/s to H200, 55.0 GB/s from it", ""),
        ({**FAST, "to_cpu": 3.9}, "3.9 GB/s from it", "the bus is slow"),
        ({"memory": 9.1}, "9.1 GB/s within CPU memory, one thread; no GPU", ""),
        ({"error": "no torch"}, "unknown", "could not be measured (no torch)"),
    ],
)
def test_what_was_measured(found: dict[str, Any], text: str, problem: str) -> None:
    (finding,) = copies.judge(found)
    assert text in finding.found and problem in finding.problem
    assert bool(finding.problem) is bool(problem) is bool(finding.remedy)
    assert not finding.refused


def test_a_child_measures_memory() -> None:
    (finding,) = copies.check(gpu=False)
    assert finding.found.endswith(" GB/s within CPU memory, one thread; no GPU"), finding.problem
