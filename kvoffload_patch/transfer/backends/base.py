"""What a copy backend is: the interface between the order of copies and the way they are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvoffload_patch.transfer.backends.load_times import LoadTimes
from kvoffload_patch.transfer.device import device_of
from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.integrity import Checksums, Verdict
from kvoffload_patch.transfer.layout import Rows


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


# Enqueues a copy slice by slice, one for each `next`: between two of them it says how many groups
# of rows are there; see `CopyBackend`. The last slice ends it. What it returns then is to be asked
# once the copy is done, if it is anything.
Slices = Generator[int, None, "Verdict | None"]


class CopyBackend(Protocol):
    """Moves whole blocks. It enqueues and returns; it never waits for the device.

    All memory of the device, and pinned memory, is taken when it is made: a copy must not fail
    because the device is full. The copies of a direction are enqueued one after another: one
    begins when the one before is exhausted or given up.

    Each `next` on what `load` and `store` return enqueues one slice, and the one that enqueues the
    last slice exhausts them: each costs the host time. Then the end of a load is behind everything
    on ``streams.blocks``, and the end of a store behind everything on ``streams.bus``. A backend
    for the CPU device copies at once, and ignores the streams.

    Every store makes checksums, where there are any. A load whose bytes are to be compared with
    them returns a verdict, as the value of its generator.

    A load may bring the rows of its blocks group by group. Its slices say of how many groups
    everything is on ``streams.blocks``, and its end says it of all; 0 where it brings all rows at
    once.

    Attributes:
        name: as users choose it.
        groups: of rows, in the order in which a load brings them; none if it brings all at once.
        checksums: of the slots.
        load_times: of the loads so far; None where they are not measured.
    """

    name: str

    @property
    def groups(self) -> Sequence[Rows]: ...

    @property
    def checksums(self) -> Checksums: ...

    @property
    def load_times(self) -> LoadTimes | None: ...

    def load(
        self,
        gpu_block_ids: Sequence[int],
        cpu_slots: Sequence[int],
        streams: Streams | None = None,
        compared: bool = False,
    ) -> Slices:
        """CPU slots to GPU blocks; ``compared``: with their checksums, where there are any."""

    def store(
        self,
        gpu_block_ids: Sequence[int],
        cpu_slots: Sequence[int],
        streams: Streams | None = None,
    ) -> Slices:
        """GPU blocks to CPU slots."""


def finish(slices: Slices) -> Verdict | None:
    """Enqueue all that is left of a copy; what to ask once it is done."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            verdict: Verdict | None = end.value
            return verdict


def new_streams(device: torch.device) -> Streams | None:
    """Streams for one link; None on the CPU device."""
    on = device_of(device)
    return None if on.is_host else Streams(on.new_stream(), on.new_stream())


def copy_now(device: torch.device, start: Callable[[], Slices]) -> float:
    """Make a copy and wait for it; the seconds it took. For start-up and tests.

    Raises:
        TransferError: what was loaded is not what was stored.
    """
    on = device_of(device)
    on.synchronize()
    begin = time.perf_counter()
    try:
        verdict = finish(start())
    finally:  # what was enqueued may use memory that an error gives back
        on.synchronize()
    took = time.perf_counter() - begin
    reason = verdict() if verdict is not None else None
    if reason is not None:
        raise TransferError(f"{reason}.")
    return took
