"""What makes CPU memory known to a device, so that it can copy from and to it."""

from __future__ import annotations

from typing import Protocol

import torch


class Registrar(Protocol):
    """What makes CPU memory known to a device. Errors are the driver's numbers, 0 for none."""

    def enter(self) -> None:
        """Called first on the thread that registers."""

    def register(self, address: int, nbytes: int) -> int: ...
    def unregister(self, address: int) -> int: ...


class CudaRegistrar:
    """CUDA's, by torch's binding, which gives the GIL up for the length of a call."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._index = index
        self._driver = torch.cuda.cudart()

    def enter(self) -> None:
        torch.cuda.set_device(self._index)

    def register(self, address: int, nbytes: int) -> int:
        return int(self._driver.cudaHostRegister(address, nbytes, 0))

    def unregister(self, address: int) -> int:
        return int(self._driver.cudaHostUnregister(address))
