"""CUDA devices. What lies under them is `backends/driver.py`, the driver's copies."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from kvoffload_patch.transfer.devices.torch import TorchDevice

if TYPE_CHECKING:
    from kvoffload_patch.transfer.backends.driver import Driver


class CudaDevice(TorchDevice):
    """A CUDA device, by torch."""

    backends: tuple[str, ...] = ("staged", "torch")
    module = "cuda"

    def handle(self, stream: Any) -> int:
        """Its ``CUstream``."""
        return int(stream.cuda_stream)

    def copier(self) -> Driver:
        """The driver's copies."""
        from kvoffload_patch.transfer.backends.driver import Driver

        return Driver()

    def registrar(self) -> CudaRegistrar:
        """CUDA's registration of memory."""
        return CudaRegistrar(self._index)

    def pci_id(self) -> str:
        """Asked of the driver, which torch has started."""
        index = self._index
        driver = ctypes.CDLL("libcuda.so.1")
        handle, text = ctypes.c_int(), ctypes.create_string_buffer(32)
        if driver.cuDeviceGet(ctypes.byref(handle), index):
            raise ValueError(f"CUDA device {index} is not known to the driver")
        if driver.cuDeviceGetPCIBusId(text, len(text), handle):
            raise ValueError(f"the PCI id of CUDA device {index} is not known")
        return text.value.decode().lower()

    def shares_memory(self) -> bool:
        """Whether the device is one of the CPU's chip."""
        return bool(getattr(torch.cuda.get_device_properties(self._device), "is_integrated", False))


class CudaRegistrar:
    """CUDA's, by torch's binding, which gives the GIL up for the length of a call."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._driver = torch.cuda.cudart()

    def enter(self) -> None:
        """Called first on the thread that registers."""
        torch.cuda.set_device(self._index)

    def register(self, address: int, nbytes: int) -> int:
        """As `cudaHostRegister`."""
        return int(self._driver.cudaHostRegister(address, nbytes, 0))

    def unregister(self, address: int) -> int:
        """As `cudaHostUnregister`."""
        return int(self._driver.cudaHostUnregister(address))
