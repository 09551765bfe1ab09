"""Devices: what each call asks of torch, and that nothing else names CUDA."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import kvoffload_patch
from kvoffload_patch.transfer.device import CudaDevice, HostDevice, device_of
from kvoffload_patch.transfer.errors import TransferError

PACKAGE = Path(kvoffload_patch.__file__).parent
# The driver's copies lie under the device.
OF_CUDA = {"transfer/device.py", "transfer/backends/driver.py"}


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


def test_a_cuda_device_asks_torch_for_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = mock.MagicMock()
    monkeypatch.setattr(torch, "cuda", cuda)
    on = torch.device("cuda", 3)
    device = device_of(on)
    assert isinstance(device, CudaDevice) and not device.is_host
    assert cuda.mock_calls == [], "nothing is asked before it is needed"
    device.use()
    device.new_stream(-1)
    device.new_event()
    device.current_stream()
    device.on("stream")
    device.synchronize()
    device.shares_memory()
    assert [call for call in cuda.mock_calls if "__" not in call[0]] == [
        mock.call.set_device(on),
        mock.call.Stream(device=on, priority=-1),
        mock.call.Event(),
        mock.call.current_stream(on),
        mock.call.stream("stream"),
        mock.call.synchronize(on),
        mock.call.get_device_properties(on),
    ]
    assert device.handle(SimpleNamespace(cuda_stream=77)) == 77


@pytest.mark.parametrize(("device", "index"), [("cuda:3", 3), ("cuda", 5)])
def test_memory_is_registered_by_the_runtime_of_the_device(
    device: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = mock.MagicMock()
    cuda.current_device.return_value = 5
    cuda.cudart().cudaHostRegister.return_value = 2
    cuda.cudart().cudaHostUnregister.return_value = 0
    monkeypatch.setattr(torch, "cuda", cuda)
    registrar = device_of(torch.device(device)).registrar()
    registrar.enter()
    cuda.set_device.assert_called_once_with(index)
    assert registrar.register(4096, 100) == 2
    cuda.cudart().cudaHostRegister.assert_called_once_with(4096, 100, 0)
    assert registrar.unregister(4096) == 0
    cuda.cudart().cudaHostUnregister.assert_called_once_with(4096)


def test_the_cpu_has_nothing_under_way_and_no_streams() -> None:
    device: Any = device_of(torch.device("cpu"))
    assert isinstance(device, HostDevice) and device.is_host and device.shares_memory()
    device.use()
    device.synchronize()
    with device.on(None):
        pass
    for name in ("new_stream", "new_event", "current_stream", "copier", "registrar", "pci_id"):
        with pytest.raises(TransferError, match="expected a device with streams"):
            getattr(device, name)()


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(TransferError, match="on a CPU or CUDA device, found meta"):
        device_of(torch.device("meta"))
