"""The direct copy backend: a kernel that reads or writes CPU memory over the bus itself.

It keeps some of the device's processors waiting for the bus, so it is bounded to a few programs.
Where processor and device share a fast link, it may be the better way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvoffload_patch.transfer.backends.base import Slices, Streams
from kvoffload_patch.transfer.backends.ids import IdUploader
from kvoffload_patch.transfer.backends.slots import SlotMemory
from kvoffload_patch.transfer.backends.tiles import TileMover
from kvoffload_patch.transfer.device import device_of
from kvoffload_patch.transfer.layout import BlockLayout

# As few as reach the bus's speed (H200): writes need no answer, reads wait for one.
LOAD_PROGRAMS, STORE_PROGRAMS = 32, 16
# Launching a slice takes the step some tens of microseconds, and a load of long prompts has many;
# stores are in small ones, because loads of their blocks may wait for them.
LOAD_SLICE_BYTES, STORE_SLICE_BYTES = 128 << 20, 32 << 20


class DirectBackend:
    """Moves blocks by one kernel for each slice, over the bus.

    Args:
        layout: the KV tensors' rows.
        slots: in CPU memory that the device can address.
    """

    name = "direct"

    def __init__(self, layout: BlockLayout, slots: SlotMemory) -> None:
        self._device = device_of(layout.device)
        self._slots = slots
        self._ids = IdUploader(layout.device)
        self._load_slice = max(1, LOAD_SLICE_BYTES // slots.pitch)
        self._store_slice = max(1, STORE_SLICE_BYTES // slots.pitch)
        self._mover = TileMover(layout, slots.pitch, [slots.address(0)])
        self.groups = [(0, len(layout.rows))]

    def store(
        self,
        gpu_block_ids: Sequence[int],
        cpu_slots: Sequence[int],
        streams: Streams | None = None,
    ) -> Slices:
        """Enqueue GPU blocks to slots."""
        assert streams is not None
        yield from self._move(True, gpu_block_ids, cpu_slots, streams)
        streams.bus.wait_stream(streams.blocks)

    def load(
        self,
        gpu_block_ids: Sequence[int],
        cpu_slots: Sequence[int],
        streams: Streams | None = None,
        arrived: Callable[[int], None] | None = None,
    ) -> Slices:
        """Enqueue slots to GPU blocks."""
        assert streams is not None
        yield from self._move(False, gpu_block_ids, cpu_slots, streams)
        if arrived is not None:
            arrived(0)

    def _move(
        self, to_slots: bool, ids: Sequence[int], slots: Sequence[int], streams: Streams
    ) -> Slices:
        streams.blocks.wait_stream(streams.bus)
        block_ids, slot_ids = (
            self._ids.upload(np.array(numbers, dtype=np.int64), streams.blocks)
            for numbers in (ids, slots)
        )
        programs = STORE_PROGRAMS if to_slots else LOAD_PROGRAMS
        size = self._store_slice if to_slots else self._load_slice
        for at in range(0, len(ids), size):
            count = min(size, len(ids) - at)
            with self._device.on(streams.blocks):
                self._mover.move(
                    to_slots, self._slots.flat, block_ids, at, count, slot_ids, programs=programs
                )
            yield
