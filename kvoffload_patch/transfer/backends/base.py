"""What a copy backend is: the interface between the order of copies and the way they are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Streams:
    """The two streams of one direction.

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

    Each `next` on what `load` and `store` return enqueues one slice. When they are exhausted,
    the end of a load is behind everything on ``streams.blocks``, and the end of a store behind
    everything on ``streams.bus``. A backend for the CPU device copies at once, and ignores the
    streams.

    Attributes:
        name: as users choose it.
        groups: row ranges (first, end) that `load` can bring one after the other; one group
            where it cannot.
    """

    name: str
    groups: list[tuple[int, int]]

    def load(
        self,
        gpu_block_ids: Sequence[int],
        cpu_slots: Sequence[int],
        streams: Streams | None = None,
        arrived: Callable[[int], None] | None = None,
    ) -> Slices:
        """CPU slots to GPU blocks.

        Args:
            arrived: called with the index of each group, in order, once everything of that
                group is enqueued on ``streams.blocks``.
        """

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
    """Streams for one direction; None on the CPU device."""
    if device.type == "cpu":
        return None
    return Streams(torch.cuda.Stream(device=device), torch.cuda.Stream(device=device))


def copy_now(device: torch.device, start: Callable[[], Slices]) -> float:
    """Make a copy and wait for it; the seconds it took. For start-up and tests."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    finish(start())
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
