"""`bench tuned`, on streams of the CPU: every number is varied where copies read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvoffload_patch.transfer import tuning
from scripts.bench.common import summary


@pytest.fixture
def tuned(enqueue: Any) -> Any:
    from scripts.bench.probes import tuned

    return tuned


@pytest.fixture
def memory(new_memory: Callable[[int, int], Any], tuned: Any) -> Any:
    return new_memory(16, 3 * tuned.BLOCKS)


def test_a_number_is_varied_where_it_is_read(tuned: Any) -> None:
    from kvoffload_patch.transfer.backends import choose, staged

    own = tuning.LOAD_GROUPS, tuning.LOAD_SLICE_BYTES
    with pytest.raises(RuntimeError), tuned.varied("LOAD_GROUPS", 7):
        assert (choose.LOAD_GROUPS, tuned.enqueue.LOAD_GROUPS, tuning.LOAD_GROUPS) == (7, 7, 7)
        raise RuntimeError
    with tuned.varied("LOAD_SLICE_BYTES", 5):
        assert staged.LOAD_SLICE_BYTES == 5
    assert own == (choose.LOAD_GROUPS, staged.LOAD_SLICE_BYTES)
    assert own == (tuned.enqueue.LOAD_GROUPS, tuning.LOAD_SLICE_BYTES)


def test_each_number_is_measured_with_what_it_is_and_with_others(tuned: Any) -> None:
    for number in tuned.NUMBERS:
        assert getattr(tuning, number.name) in number.values
        assert len(set(number.values)) == len(number.values) > 1


def test_every_row_is_measured_and_told(memory: Any, tuned: Any) -> None:
    rows = [row for number in tuned.NUMBERS for row in tuned.measured(number, memory, 1)]
    assert {row["number"] for row in rows} == {number.name for number in tuned.NUMBERS}
    told = tuned.report(rows)
    assert told.count("**") == 2 * sum(row["ours"] for row in rows)
    assert len(told.split("\n\n")) == len(tuned.NUMBERS)


def test_rows_and_runs_are_what_the_driver_is_asked_for(memory: Any, tuned: Any) -> None:
    (number,) = [number for number in tuned.NUMBERS if number.name == "RUN_BLOCKS"]
    measure = number.cases["load by layer, runs of 4"]
    asked = []
    for value in (tuned.ALWAYS_RUNS, tuned.NEVER_RUNS):
        memory._driver.calls.clear()
        with tuned.varied(number.name, value):
            measure(memory, 1)
        asked.append(max(memory._driver.calls))
    assert asked[0] < 0 < asked[1]


def test_a_table_for_each_number(tuned: Any) -> None:
    def row(name: str, value: int, ours: bool) -> dict[str, Any]:
        figures = {tuned.HOST: summary([1.0, 2.0, 3.0])}
        return {"number": name, "case": "a load", "value": value, "ours": ours, "figures": figures}

    told = tuned.report([row("RUN_BLOCKS", 1, False), row("LOAD_SLICE_BYTES", 128 << 20, True)])
    first, second = told.split("\n\n")
    assert "| a load     | runs | 2.00 (1.00 to 3.00) |" in first
    assert "| **128 MiB** | 2.00 (1.00 to 3.00) |" in second


def test_without_a_gpu_it_says_so(
    tuned: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["tuned", "--only", "LOAD_GROUPS"])
    assert tuned.main() == 2
    assert "expected a CUDA GPU" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["tuned", "--only", "GROUPS"])
    with pytest.raises(SystemExit):
        tuned.main()
    assert "found GROUPS" in capsys.readouterr().err
