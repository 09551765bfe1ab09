"""What a copy backend is: the interface between the order of copies and the way they are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvoffload_patch.transfer.device import device_of


@dataclass(frozen=True)
class Streams:
    """The two streams of one link.

    Attributes:
        blocks: whatever reads or writes GPU blocks is enqueued here.
        bus: whatever reads or writes CPU slots is enqueued here, or on another stream, behind what
            is here before it and waited for by what comes here after it.
    """

    blocks: Any
    bus: Any


# Enqueues a copy slice by slice, one for each `next`; see `CopyBackend`.
Slices = Iterator[None]


class CopyBackend(Protocol):
    """Moves whole blocks. It enqueues and returns; it never waits for the device.

    All memory of the device, and pinned memory, is taken when it is made: a copy must not fail
    because the device is full. The copies of a direction are enqueued one after another: one
    begins when the one before is exhausted or given up.

    Each `next` on what `load` and `store` return enqueues one slice. When they are exhausted,
    the end of a load is behind everything on ``streams.blocks``, and the end of a store behind
    everything on ``streams.bus``. A backend for the CPU device copies at once, and ignores the
    streams.

    Attributes:
        name: as users choose it.
    """

    name: str

    def load(
        self,
        gpu_block_ids: Sequence[int],
        cpu_slots: Sequence[int],
        streams: Streams | None = None,
    ) -> Slices:
        """CPU slots to GPU blocks."""

    def store(
        self,
        gpu_block_ids: Sequence[int],
        cpu_slots: Sequence[int],
        streams: Streams | None = None,
    ) -> Slices:
        """GPU blocks to CPU slots."""


def finish(slices: Slices) -> None:
    """Enqueue all that is left of a copy."""
    for _ in slices:
        pass


def new_streams(device: torch.device) -> Streams | None:
    """Streams for one link; None on the CPU device."""
    on = device_of(device)
    return None if on.is_host else Streams(on.new_stream(), on.new_stream())


def copy_now(device: torch.device, start: Callable[[], Slices]) -> float:
    """Make a copy and wait for it; the seconds it took. For start-up and tests."""
    on = device_of(device)
    on.synchronize()
    begin = time.perf_counter()
    finish(start())
    on.synchronize()
    return time.perf_counter() - begin
