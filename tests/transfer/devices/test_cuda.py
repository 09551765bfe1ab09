"""CUDA devices: what each call asks of torch."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from kvoffload_patch.transfer.device import device_of
from kvoffload_patch.transfer.devices.cuda import CudaDevice
from kvoffload_patch.transfer.errors import CannotRegister


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


def test_a_stream_is_told_from_others_by_its_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = mock.MagicMock()
    monkeypatch.setattr(torch, "cuda", cuda)
    device = device_of(torch.device("cuda", 3))
    find = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, find, lambda index: 1000 + index, raising=False)
    assert device.current_stream_id() == 1003 and not cuda.mock_calls
    monkeypatch.delattr(torch._C, find)
    assert device.current_stream_id() is cuda.current_stream(torch.device("cuda", 3))


@pytest.mark.parametrize(("device", "index"), [("cuda:3", 3), ("cuda", 5)])
def test_memory_is_registered_by_the_runtime_of_the_device(
    device: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = mock.MagicMock()
    cuda.current_device.return_value = 5
    cuda.cudart().cudaHostRegister.return_value = 2
    cuda.cudart().cudaHostUnregister.return_value = 0
    monkeypatch.setattr(torch, "cuda", cuda)
    # What the runtime keeps of an error is raised by the next launch on the thread.
    launched = mock.MagicMock(side_effect=RuntimeError("CUDA error: invalid argument"))
    monkeypatch.setattr(torch, "ones", launched)
    registrar = device_of(torch.device(device)).registrar()
    registrar.enter()
    cuda.set_device.assert_called_once_with(index)
    assert registrar.register(4096, 100) == 2
    cuda.cudart().cudaHostRegister.assert_called_once_with(4096, 100, 0)
    assert registrar.unregister(4096) == 0
    cuda.cudart().cudaHostUnregister.assert_called_once_with(4096)
    assert [call.kwargs["device"] for call in launched.call_args_list] == [
        torch.device("cuda", index)
    ]
    cuda.cudart().cudaHostRegister.return_value = 801  # cudaErrorNotSupported
    with pytest.raises(CannotRegister, match="does not .error 801, as under NVIDIA's confid"):
        registrar.register(4096, 100)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_error_is_not_left_for_the_next_launch() -> None:
    device = torch.device("cuda")
    registrar = device_of(device).registrar()
    for answer in (registrar.register(4096, 10), registrar.unregister(4096)):
        assert answer
        assert (torch.zeros(8, device=device) + 1).sum().item() == 8
