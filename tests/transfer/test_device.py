"""Devices: which there are, and that nothing else names CUDA."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvoffload_patch
from kvoffload_patch.config import COPY_BACKENDS
from kvoffload_patch.transfer.device import device_of
from kvoffload_patch.transfer.devices.cuda import CudaDevice
from kvoffload_patch.transfer.devices.host import HostDevice
from kvoffload_patch.transfer.devices.npu import NpuDevice
from kvoffload_patch.transfer.devices.rocm import RocmDevice
from kvoffload_patch.transfer.devices.xpu import XpuDevice
from kvoffload_patch.transfer.errors import TransferError

PACKAGE = Path(kvoffload_patch.__file__).parent
# The registry of kinds, the device and its variant, and the driver's copies, which lie under it.
OF_CUDA = {
    "transfer/device.py",
    "transfer/devices/cuda.py",
    "transfer/devices/rocm.py",
    "transfer/backends/driver.py",
}


def names_cuda(file: Path) -> Iterator[str]:
    """Lines whose code, not whose prose, names CUDA: `torch.cuda`, libcuda, a type of device."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name | ast.alias | ast.Constant):
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            name = name or getattr(node, "name", None) or getattr(node, "value", None)
            # Prose has blanks.
            if isinstance(name, str) and "cuda" in name.lower() and " " not in name:
                yield f"{file.relative_to(PACKAGE)}:{node.lineno} {name}"


def test_only_the_device_names_cuda() -> None:
    files = [*PACKAGE.glob("transfer/**/*.py"), PACKAGE / "integration/worker/memory.py"]
    found = {file.relative_to(PACKAGE).as_posix(): list(names_cuda(file)) for file in files}
    assert {name for name, lines in found.items() if lines} == OF_CUDA, found


def test_the_cpu_has_nothing_under_way_and_no_streams() -> None:
    device: Any = device_of(torch.device("cpu"))
    assert isinstance(device, HostDevice) and device.is_host and device.shares_memory()
    device.use()
    device.synchronize()
    with device.on(None):
        pass
    streams = ("new_stream", "new_event", "current_stream", "current_stream_id")
    for name in (*streams, "copier", "registrar", "pci_id"):
        with pytest.raises(TransferError, match="expected a device with streams"):
            getattr(device, name)()


@pytest.mark.parametrize(
    ("kind", "hip", "wanted", "never_run"),
    [
        ("cpu", None, HostDevice, False),
        ("cuda", None, CudaDevice, False),
        ("cuda", "7.2", RocmDevice, True),
        ("xpu", None, XpuDevice, True),
        ("npu", None, NpuDevice, True),
    ],
)
def test_each_kind_has_its_device_and_says_whether_it_was_ever_run(
    kind: str, hip: str | None, wanted: type, never_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    on: Any = SimpleNamespace(type=kind, index=0)  # torch knows npu with torch_npu only
    device = device_of(on)
    assert type(device) is wanted
    assert bool(device.not_run) == never_run
    assert device.backends and set(device.backends) <= set(COPY_BACKENDS)


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(TransferError, match="on one of cpu, cuda, npu, xpu, found meta"):
        device_of(torch.device("meta"))
