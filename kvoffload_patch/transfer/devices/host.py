"""The CPU as a device: copies are made by calls, and done when these return."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

from kvoffload_patch.transfer.errors import TransferError


class HostDevice:
    """The CPU: nothing is ever under way."""

    is_host = True
    registers = False
    backends: tuple[str, ...] = ("torch",)
    not_run = ""

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

    new_stream = new_event = current_stream = current_stream_id = handle = _has_none
    copier = registrar = pci_id = _has_none
