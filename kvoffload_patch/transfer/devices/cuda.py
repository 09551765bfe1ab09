"""CUDA devices. What lies under them is `backends/driver.py`, the driver's copies."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from kvoffload_patch.transfer.devices.torch import TorchDevice
from kvoffload_patch.transfer.errors import CannotRegister

if TYPE_CHECKING:
    from kvoffload_patch.transfer.backends.driver import Driver

_NOT_SUPPORTED = 801  # cudaErrorNotSupported


class CudaDevice(TorchDevice):
    """A CUDA device, by torch."""

    backends: tuple[str, ...] = ("staged", "torch")
    registers = True
    module = "cuda"

    def handle(self, stream: Any) -> int:
        """Its ``CUstream``."""
        return int(stream.cuda_stream)

    def current_stream_id(self) -> Hashable:
        """The handle of the stream: torch makes no Python object for it."""
        find = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        return super().current_stream_id() if find is None else int(find(self._index))

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
        """As `cudaHostRegister`.

        Raises:
            CannotRegister: the driver has no such call here, as in confidential computing.
        """
        error = self._answered(self._driver.cudaHostRegister(address, nbytes, 0))
        if error == _NOT_SUPPORTED:
            raise CannotRegister(
                "expected a driver that registers CPU memory, found that this one does not (error "
                f"{error}, as under NVIDIA's confidential computing); set KVOFFLOAD_STRICT=0 to "
                "serve without the CPU tier."
            )
        return error

    def unregister(self, address: int) -> int:
        """As `cudaHostUnregister`."""
        return self._answered(self._driver.cudaHostUnregister(address))

    def _answered(self, error: Any) -> int:
        """An error's number. The runtime keeps it for the thread, and torch would raise it there.

        Whose launch that would be knows nothing of it, so one of ours takes it away.
        """
        if int(error):
            with suppress(RuntimeError):
                torch.ones(1, device=torch.device("cuda", self._index))
        return int(error)
