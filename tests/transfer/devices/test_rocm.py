"""ROCm devices: as CUDA ones, but that torch makes the copies. None has run any of this."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from kvoffload_patch.transfer.devices.rocm import RocmDevice
from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.memory.numa import node_of


def test_streams_and_registration_are_those_of_torch_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = mock.MagicMock()
    cuda.cudart().cudaHostRegister.return_value = 0
    monkeypatch.setattr(torch, "cuda", cuda)
    device = RocmDevice(torch.device("cuda", 1))
    device.new_stream(-1)
    cuda.Stream.assert_called_once_with(device=torch.device("cuda", 1), priority=-1)
    assert device.registrar().register(4096, 100) == 0
    cuda.cudart().cudaHostRegister.assert_called_once_with(4096, 100, 0)


def test_nothing_is_asked_of_a_cuda_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.2")
    device = RocmDevice(torch.device("cuda", 1))
    with mock.patch("ctypes.CDLL") as loaded:
        with pytest.raises(TransferError, match="with a driver's copies, found cuda:1"):
            device.copier()
        assert node_of(torch.device("cuda", 1)) is None
    loaded.assert_not_called()
