"""`Launcher`: what Triton has compiled is found again, and only for launches of its kind."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from kvoffload_patch.transfer.backends.launches import Launcher, aligned


class Kernel:
    """As Triton's: what a launch returns is launched with all arguments and the stream's handle."""

    def __init__(self, compiles: bool = True) -> None:
        self.calls: list[Any] = []
        self._compiles = compiles

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def first(*args: Any, **options: Any) -> Any:
            self.calls.append(("compiled", grid, args, options))
            return _Compiled(self.calls) if self._compiles else None

        return first


class _Compiled:
    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, stream: self._calls.append(("launched", grid, args, stream))


class Device:
    """Its streams are their handles."""

    def __init__(self) -> None:
        self.used: list[int] = []

    def on(self, stream: int) -> AbstractContextManager[Any]:
        self.used.append(stream)
        return nullcontext()

    def handle(self, stream: int) -> int:
        return stream + 100


def launcher(kernel: Kernel, device: Any) -> Launcher:
    return Launcher(kernel, device, {"TO": True, "SIZE": 8}, num_warps=4)


def test_a_kind_is_looked_for_once() -> None:
    kernel, device = Kernel(), Device()
    launch = launcher(kernel, device).launch
    launch(7, 1, "a", "rows", 3)
    launch(9, 2, "a", "rows", 4)
    launch(5, 1, "b", None, 4)
    options = {"TO": True, "SIZE": 8, "num_warps": 4}
    assert kernel.calls == [
        ("compiled", (7,), ("rows", 3), options),
        ("launched", (9, 1, 1), ("rows", 4, True, 8), 102),
        ("compiled", (5,), (None, 4), options),
    ]
    assert device.used == [1, 1]  # made the current stream where Triton asks for it


@pytest.mark.parametrize(("compiles", "kind"), [(True, None), (False, "a")])
def test_what_is_of_no_kind_or_interpreted_is_not_kept(compiles: bool, kind: Any) -> None:
    kernel = Kernel(compiles)
    launch = launcher(kernel, Device()).launch
    for _ in range(2):
        launch(7, 1, kind, "rows")
    assert [name for name, *_ in kernel.calls] == ["compiled", "compiled"]


def test_addresses_that_16_divides() -> None:
    whole = torch.zeros(64, dtype=torch.uint8)
    shift = -whole.data_ptr() % 16
    assert aligned(whole[shift:], None, whole[shift + 16 :])
    assert not aligned(whole[shift:], whole[shift + 8 :])
