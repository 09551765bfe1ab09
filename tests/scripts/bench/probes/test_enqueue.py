"""`bench enqueue`, on streams of the CPU: every case is a copy that the backend makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def memory(new_memory: Callable[[int, int], Any]) -> Any:
    return new_memory(4, 100)


def test_every_case_is_measured_and_told(memory: Any, enqueue: Any) -> None:
    rows = [enqueue.measured(memory, case, repeats=2) for case in enqueue.cases(33)]
    assert len({row["case"] for row in rows}) == len(rows) == 8
    assert all(len(row["host_ms"]) == len(row["device_ms"]) == 2 for row in rows)
    told = enqueue.report(rows).splitlines()
    assert len(told) == len(rows) + 2
    assert "load by layer, 33 blocks, runs of 16" in told[2]


def test_runs_and_scattered_slots(memory: Any, enqueue: Any) -> None:
    calls = []
    for run in (16, 1):
        memory._driver.calls.clear()
        enqueue.measured(memory, enqueue.Case("", False, True, 33, run), repeats=1)
        calls.append(list(memory._driver.calls))
    assert {-16, -1} >= set(calls[0]), "two runs of 16 and a slot alone, by layer"
    assert set(calls[1]) == {33}, "rows of their own, in one call"


def test_a_load_of_other_bytes_ends_it(memory: Any) -> None:
    memory.slots.slots.zero_()
    memory.rows[0].fill_(1)
    with pytest.raises(SystemExit, match="block 3 is not what slot 5 holds"):
        memory.compare([3], [5])
