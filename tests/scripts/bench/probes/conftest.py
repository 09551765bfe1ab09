"""Memory of `bench enqueue`, on streams of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture
def enqueue() -> Any:
    """Imported when a test runs: `tests/transfer` decides what the kernels are, as it is found."""
    pytest.importorskip("triton")
    from scripts.bench.probes import enqueue

    return enqueue


@pytest.fixture
def new_memory(
    monkeypatch: pytest.MonkeyPatch, enqueue: Any
) -> Iterator[Callable[[int, int], Any]]:
    """Makes the memory of so many layers and blocks, with a driver that notes its calls."""
    from transfer import plain_kernels
    from transfer.fake_cuda import FakeCuda, FakeDriver

    registrar = SimpleNamespace(register=lambda address, nbytes: 0)
    monkeypatch.setattr(enqueue, "ROW_BYTES", 48)
    monkeypatch.setattr(FakeCuda, "registrar", lambda self: registrar, raising=False)
    with ExitStack() as stack:
        stack.enter_context(plain_kernels.used())
        cuda = stack.enter_context(FakeCuda())

        def make(layers: int, blocks: int) -> Any:
            monkeypatch.setattr(enqueue, "LAYERS", layers)
            made = enqueue.Memory(blocks, torch.device("cpu"), None)
            made._driver = FakeDriver(cuda, made.slots, enqueue.RUN_SLOTS)
            return made

        yield make
