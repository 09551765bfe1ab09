"""Stand-ins for the driver that registers CPU memory, and slots that are registered by them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from kvoffload_patch.transfer.memory.host_buffer import HostBuffer


class Registrar:
    """Notes what is registered, from which thread, and refuses what it is told to.

    Args:
        refuse_at: index of the piece that is answered with error 2; -1 for none.
        before: called with the index of each piece before it is registered.
    """

    def __init__(
        self, refuse_at: int = -1, before: Callable[[int], object] = lambda i: None
    ) -> None:
        self.refuse_at = refuse_at
        self.before = before
        self.entered: threading.Thread | None = None
        self.asked: list[tuple[int, int]] = []
        self.held: dict[int, int] = {}

    def enter(self) -> None:
        self.entered = threading.current_thread()

    def register(self, address: int, nbytes: int) -> int:
        assert self.entered is threading.current_thread()
        index = len(self.asked)
        self.before(index)
        self.asked.append((address, nbytes))
        if index == self.refuse_at:
            return 2
        assert address not in self.held
        self.held[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        del self.held[address]
        return 0


def grown(
    num_slots: int, block_bytes: int, registrar: Registrar, piece_bytes: int = 4 << 20, **more: Any
) -> HostBuffer:
    """Slots for a GPU, registered by a stand-in, piece after piece."""
    device = torch.device("cuda", 0)
    return HostBuffer(num_slots, block_bytes, device, piece_bytes, registrar=registrar, **more)
