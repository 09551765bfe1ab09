"""`bench enqueue`, on streams of the CPU: every case is a copy that the backend makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def enqueue() -> Any:
    """Imported when a test runs: `tests/transfer` decides what the kernels are, as it is found."""
    pytest.importorskip("triton")
    from scripts.bench.probes import enqueue

    return enqueue


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, enqueue: Any) -> Any:
    from transfer import plain_kernels
    from transfer.fake_cuda import FakeCuda, FakeDriver

    monkeypatch.setattr(enqueue, "LAYERS", 4)
    monkeypatch.setattr(enqueue, "ROW_BYTES", 48)
    registrar = SimpleNamespace(register=lambda address, nbytes: 0)
    monkeypatch.setattr(FakeCuda, "registrar", lambda self: registrar, raising=False)
    with plain_kernels.used(), FakeCuda() as cuda:
        made = enqueue.Memory(100, CPU, None)
        made._driver = FakeDriver(cuda, made.slots, enqueue.RUN_SLOTS)
        yield made


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
