"""Devices: streams, events, registered memory and copies by the driver, behind one interface.

Another kind of device is a module of `devices/`, a row of `_KINDS`, and, where none of the copy
backends does, one of these. A stream is any object with ``wait_event``, ``wait_stream`` and
``synchronize``, an event one with ``record``, ``query`` and ``synchronize``, as PyTorch has them;
an event that was never recorded counts as done. No stream is asked whether it is done, because
that may wait (`CopyQueue.awaited`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from kvoffload_patch.transfer.devices.cuda import CudaDevice
from kvoffload_patch.transfer.devices.host import HostDevice
from kvoffload_patch.transfer.devices.npu import NpuDevice
from kvoffload_patch.transfer.devices.rocm import RocmDevice
from kvoffload_patch.transfer.devices.xpu import XpuDevice
from kvoffload_patch.transfer.errors import TransferError


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
        backends: copy backends that work on it, the first choice first.
        not_run: what to call a kind of device on which the tier was never run; empty if it was.
        registers: CPU memory is made known to it. If not, torch may read that when a copy is
            enqueued, and not when the device comes to it.
    """

    is_host: bool
    registers: bool
    backends: tuple[str, ...]
    not_run: str

    def use(self) -> None:
        """Make it the device of this thread."""

    def new_stream(self, priority: int = 0) -> Any:
        """A stream; lower priorities are more urgent."""

    def new_event(self, timed: bool = False) -> Any:
        """An event; a timed one has ``elapsed_time``, the milliseconds to another one."""

    def current_stream(self) -> Any:
        """The stream of what this thread computes."""

    def current_stream_id(self) -> Hashable:
        """What tells that stream from others: each layer of a model asks for it."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one; None leaves it as it is."""

    def handle(self, stream: Any) -> int:
        """What the driver knows a stream by."""

    def synchronize(self) -> None:
        """Wait, on the host, for all that it was given."""

    def copier(self) -> Any:
        """The driver's copies, as the device's own backend takes them.

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


_KINDS: dict[str, Callable[[torch.device], Device]] = {
    "cpu": lambda device: HostDevice(),
    "cuda": lambda device: (RocmDevice if torch.version.hip else CudaDevice)(device),
    "npu": NpuDevice,
    "xpu": XpuDevice,
}


def device_of(device: torch.device) -> Device:
    """What copies need of a torch device.

    Raises:
        TransferError: it is of a kind that nothing copies on.
    """
    kind = _KINDS.get(device.type)
    if kind is None:
        known = ", ".join(_KINDS)
        raise TransferError(
            f"expected KV tensors on one of {known}, found {device}; "
            "set KVOFFLOAD_STRICT=0 to serve without the CPU tier."
        )
    return kind(device)
