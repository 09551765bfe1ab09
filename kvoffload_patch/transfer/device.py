"""Devices: streams, events, registered memory and copies by the driver, behind one interface.

The one place that names CUDA, with what lies under it: `backends/driver.py`, its copies. Another
kind of device is another class here and a row of `_KINDS`. A stream is any object with
``wait_event``, ``wait_stream`` and ``synchronize``, an event one with ``record``, ``query`` and
``synchronize``, as PyTorch has them; an event that was never recorded counts as done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from kvoffload_patch.transfer.errors import TransferError

if TYPE_CHECKING:
    from kvoffload_patch.transfer.backends.driver import Driver


class Registrar(Protocol):
    """What makes CPU memory known to a device. Errors are the driver's numbers, 0 for none."""

    def enter(self) -> None:
        """Called first on the thread that registers."""

    def register(self, address: int, nbytes: int) -> int: ...
    def unregister(self, address: int) -> int: ...


class Device(Protocol):
    """What copies need of a device.

    Attributes:
        is_host: its memory is the CPU's: copies are made by calls, and done when these return.
    """

    is_host: bool

    def use(self) -> None:
        """Make it the device of this thread."""

    def new_stream(self, priority: int = 0) -> Any:
        """A stream; lower priorities are more urgent."""

    def new_event(self) -> Any:
        """An event."""

    def current_stream(self) -> Any:
        """The stream of what this thread computes."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one; None leaves it as it is."""

    def handle(self, stream: Any) -> int:
        """What the driver knows a stream by."""

    def synchronize(self) -> None:
        """Wait, on the host, for all that it was given."""

    def copier(self) -> Driver:
        """The driver's copies.

        Raises:
            TransferError: there is no driver.
        """

    def registrar(self) -> Registrar:
        """What makes CPU memory known to it."""

    def pci_id(self) -> str:
        """As sysfs names it, such as 0000:3b:00.0.

        Raises:
            OSError, AttributeError, ValueError: there is no driver, or it does not tell.
        """

    def shares_memory(self) -> bool:
        """Whether CPU memory is its own memory."""


class HostDevice:
    """The CPU: nothing is ever under way."""

    is_host = True

    def use(self) -> None:
        """Every thread has it."""

    def on(self, stream: object) -> AbstractContextManager[Any]:
        """There are no streams."""
        return nullcontext()

    def synchronize(self) -> None:
        """Nothing is under way."""

    def shares_memory(self) -> bool:
        """It is the CPU's."""
        return True

    def _has_none(self, *_: object, **__: object) -> NoReturn:
        raise TransferError("expected a device with streams and a driver, found the CPU.")

    new_stream = new_event = current_stream = handle = _has_none
    copier = registrar = pci_id = _has_none


class CudaDevice:
    """A CUDA device, by torch. Nothing is asked of it before a method is called.

    Args:
        device: of type ``cuda``; without an index, the current one.
    """

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def use(self) -> None:
        """Make it the device of this thread."""
        torch.cuda.set_device(self._device)

    def new_stream(self, priority: int = 0) -> Any:
        """As `torch.cuda.Stream`."""
        return torch.cuda.Stream(device=self._device, priority=priority)

    def new_event(self) -> Any:
        """As `torch.cuda.Event`."""
        return torch.cuda.Event()

    def current_stream(self) -> Any:
        """The stream of what this thread computes."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """As `torch.cuda.stream`."""
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def handle(self, stream: Any) -> int:
        """Its ``CUstream``."""
        return int(stream.cuda_stream)

    def synchronize(self) -> None:
        """Wait, on the host, for all that it was given."""
        torch.cuda.synchronize(self._device)

    def copier(self) -> Driver:
        """The driver's copies."""
        from kvoffload_patch.transfer.backends.driver import Driver

        return Driver()

    def registrar(self) -> Registrar:
        """CUDA's registration of memory."""
        return CudaRegistrar(self._index())

    def pci_id(self) -> str:
        """Asked of the driver, which torch has started."""
        index = self._index()
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

    def _index(self) -> int:
        index = self._device.index
        return int(torch.cuda.current_device() if index is None else index)


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


_KINDS: dict[str, Callable[[torch.device], Device]] = {
    "cpu": lambda device: HostDevice(),
    "cuda": CudaDevice,
}


def device_of(device: torch.device) -> Device:
    """What copies need of a torch device.

    Raises:
        TransferError: it is of a kind that nothing copies on.
    """
    kind = _KINDS.get(device.type)
    if kind is None:
        raise TransferError(f"expected KV tensors on a CPU or CUDA device, found {device}.")
    return kind(device)
