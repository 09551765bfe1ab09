"""The child that copies: a number for CPU memory, and one for each direction of the bus."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload_patch.cli.doctor import copy_speed


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_speed, "COPIED_BYTES", 1 << 20)


def test_copies_within_memory_have_a_speed() -> None:
    found = copy_speed.of_memory()
    assert list(found) == ["memory"] and float(str(found["memory"])) > 0


def test_both_directions_of_the_bus_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    empty, copied = torch.empty, []

    def fake(size: int, dtype: Any, device: str = "cpu", pin_memory: bool = False) -> Any:
        made = empty(size, dtype=dtype)
        made.copy_ = lambda source: copied.append(pin_memory)
        return made

    monkeypatch.setattr(torch, "empty", fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    found = copy_speed.of_gpu()
    assert found["gpu"] == "GPU" and {"to_cpu", "to_gpu"} < set(found)
    assert copied == [True] * 4 + [False] * 4


@pytest.mark.gpu
def test_a_real_bus() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    found = copy_speed.of_gpu()
    assert float(str(found["to_cpu"])) > 0 and float(str(found["to_gpu"])) > 0
