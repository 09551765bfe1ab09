"""`AclDriver`: what it hands to AscendCL, by a library that is compiled here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transfer.standin_npu import INDEX, StandinNpu, compiled, needs_compiler, standin

from kvoffload_patch.transfer.backends import acl
from kvoffload_patch.transfer.backends.acl import AclDriver, load_library
from kvoffload_patch.transfer.errors import TransferError

pytestmark = needs_compiler
SIZES = (64, 512, 1, 4096)


@pytest.fixture
def use(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., StandinNpu]]:
    with ExitStack() as stack:
        folder = tmp_path_factory.getbasetemp()
        yield lambda **how: stack.enter_context(standin(folder, **how))


class Runs:
    """Runs of bytes from one array to another, some of which lie elsewhere there."""

    def __init__(self) -> None:
        self.source = np.random.default_rng(0).integers(0, 256, 16_384, dtype=np.uint8)
        self.target = np.zeros_like(self.source)
        self.begins = np.array([0, 1024, 4096, 8192], dtype=np.int64)
        self.ends = np.array([8192, 0, 2048, 12_000], dtype=np.int64)

    def copy(self, driver: AclDriver, stream: Any, count: int = 4, to_device: bool = True) -> None:
        targets = self.target.ctypes.data + self.ends[:count]
        sources = self.source.ctypes.data + self.begins[:count]
        sizes = np.array(SIZES[:count], dtype=np.int64)
        driver.copy_many(targets, sources, sizes, stream.npu_stream, to_device)

    def wanted(self, count: int = 4) -> Any:
        made = np.zeros_like(self.source)
        for begin, end, size in zip(self.begins[:count], self.ends, SIZES):
            made[end : end + size] = self.source[begin : begin + size]
        return made


@pytest.mark.parametrize("to_device", [True, False])
def test_many_runs_are_one_call(use: Callable[..., StandinNpu], to_device: bool) -> None:
    npu, runs = use(), Runs()
    runs.copy(AclDriver(INDEX), npu.current, to_device=to_device)
    npu.synchronize()
    assert (runs.target == runs.wanted()).all()
    assert (npu.batches, npu.singles, npu.copies) == (1, 0, 4)


def test_a_single_run_needs_no_batch(use: Callable[..., StandinNpu]) -> None:
    npu, runs = use(), Runs()
    runs.copy(AclDriver(INDEX), npu.current, count=1)
    npu.synchronize()
    assert (runs.target == runs.wanted(1)).all()
    assert (npu.batches, npu.singles) == (0, 1)


@pytest.mark.parametrize("to_device", [True, False])
def test_an_older_cann_is_asked_run_by_run(use: Callable[..., StandinNpu], to_device: bool) -> None:
    npu, runs = use(old=True), Runs()
    runs.copy(AclDriver(INDEX), npu.current, to_device=to_device)
    npu.synchronize()
    assert (runs.target == runs.wanted()).all()
    assert (npu.singles, npu.copies) == (4, 4)


def test_a_device_without_the_batched_copy_is_asked_for_it_once(
    use: Callable[..., StandinNpu],
) -> None:
    npu, runs = use(), Runs()
    npu.put(batch_error=207000)
    driver = AclDriver(INDEX)
    runs.copy(driver, npu.current)
    npu.put(batch_error=0)
    runs.copy(driver, npu.current)
    npu.synchronize()
    assert (runs.target == runs.wanted()).all()
    assert (npu.batches, npu.singles) == (0, 8)


def test_a_refusal_is_told_with_its_number_and_its_copy(use: Callable[..., StandinNpu]) -> None:
    npu, runs = use(), Runs()
    npu.put(fail_in=1)  # the last of the batch is taken first
    with pytest.raises(
        TransferError, match=r"\(aclrtMemcpyBatchAsync, copy 2 of 4 answered 507899\)"
    ):
        runs.copy(AclDriver(INDEX), npu.current)
    npu.put(fail_in=0)
    with pytest.raises(TransferError, match=r"\(aclrtMemcpyAsync answered 507899\)"):
        runs.copy(AclDriver(INDEX), npu.current, count=1)


def test_the_device_is_named_in_the_attributes(use: Callable[..., StandinNpu]) -> None:
    npu, runs = use(), Runs()
    with pytest.raises(TransferError, match="answered 107000"):
        runs.copy(AclDriver(INDEX + 1), npu.current)


def test_a_cann_whose_events_cannot_be_recorded_again_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(acl, "LIBRARY", str(compiled(tmp_path, old=True, oldest=True)))
    with pytest.raises(TransferError, match="expected a CANN whose events can be recorded again"):
        AclDriver(INDEX)


def test_a_system_without_cann_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(acl, "LIBRARY", str(tmp_path / "libascendcl.so"))
    with pytest.raises(TransferError, match=r"expected CANN's .*libascendcl.so, found "):
        load_library()
