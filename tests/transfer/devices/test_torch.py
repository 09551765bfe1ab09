"""A device by torch alone: memory stays unregistered, and no driver is called past torch."""

from __future__ import annotations

import pytest
import torch

from kvoffload_patch.transfer.devices.torch import TorchDevice
from kvoffload_patch.transfer.errors import TransferError


def test_memory_stays_as_it_is() -> None:
    device = TorchDevice(torch.device("xpu"))
    registrar = device.registrar()
    registrar.enter()
    assert not device.registers
    assert (registrar.register(4096, 100), registrar.unregister(4096)) == (0, 0)


def test_there_is_no_driver() -> None:
    device = TorchDevice(torch.device("xpu", 1))
    for ask in (device.copier, lambda: device.handle(None)):
        with pytest.raises(TransferError, match="with a driver's copies, found xpu:1"):
            ask()
    with pytest.raises(ValueError, match="PCI id of xpu:1 is not known"):
        device.pci_id()
    assert not device.shares_memory()
