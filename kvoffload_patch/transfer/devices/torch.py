"""A device by torch alone: its streams, its events, and copies by torch's own operations."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch

from kvoffload_patch.transfer.errors import TransferError


class TorchDevice:
    """A device by torch's module for its kind. Nothing is asked of it before a method is called.

    A kind of device derives from it and names its module; what it has besides, a driver's copies
    or registered memory, it adds.

    Args:
        device: without an index, the current one.
    """

    is_host = False
    registers = False
    backends: tuple[str, ...] = ("torch",)
    not_run = ""
    module = ""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def use(self) -> None:
        """Make it the device of this thread."""
        self._torch.set_device(self._device)

    def new_stream(self, priority: int = 0) -> Any:
        """As torch's ``Stream``."""
        return self._torch.Stream(device=self._device, priority=priority)

    def new_event(self, timed: bool = False) -> Any:
        """As torch's ``Event``."""
        return self._torch.Event(enable_timing=True) if timed else self._torch.Event()

    def current_stream(self) -> Any:
        """The stream of what this thread computes."""
        return self._torch.current_stream(self._device)

    def current_stream_id(self) -> Hashable:
        """The stream itself."""
        stream: Hashable = self.current_stream()
        return stream

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """As torch's ``stream``."""
        context: AbstractContextManager[Any] = self._torch.stream(stream)
        return context

    def synchronize(self) -> None:
        """Wait, on the host, for all that it was given."""
        self._torch.synchronize(self._device)

    def registrar(self) -> Any:
        """Torch has no call for it: memory stays as it is."""
        return Unregistered()

    def shares_memory(self) -> bool:
        """It has memory of its own."""
        return False

    def pci_id(self) -> str:
        """Torch does not tell."""
        raise ValueError(f"the PCI id of {self._device} is not known")

    def handle(self, stream: Any) -> int:
        """There is no driver that is called past torch."""
        raise self._no_driver()

    def copier(self) -> Any:
        """There is no driver that is called past torch."""
        raise self._no_driver()

    def _no_driver(self) -> TransferError:
        return TransferError(f"expected a device with a driver's copies, found {self._device}.")

    @property
    def _torch(self) -> Any:
        return getattr(torch, self.module)

    @property
    def _index(self) -> int:
        index = self._device.index
        return int(self._torch.current_device() if index is None else index)


class Unregistered:
    """Memory that a device does not know: its copies are right, and torch buffers them itself."""

    def enter(self) -> None:
        """Nothing is called."""

    def register(self, address: int, nbytes: int) -> int:
        """Nothing to be done."""
        return 0

    def unregister(self, address: int) -> int:
        """Nothing to be undone."""
        return 0
