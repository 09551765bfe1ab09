"""The direct copy backend: rows of blocks cross the bus as they are, many in one call.

For devices whose driver copies many runs of bytes at once and for which no kernel packs them. It
runs nothing on the device and takes no memory there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import Protocol

import numpy as np
import torch

from kvoffload_patch.transfer.backends.base import Slices, Streams
from kvoffload_patch.transfer.backends.slots import Numbers, SlotMemory
from kvoffload_patch.transfer.device import device_of
from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.integrity import Checksums
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.tuning import STORE_SLICE_BYTES


class Copier(Protocol):
    """A driver's copies of many runs of bytes.

    Attributes:
        alignment: what addresses have to be multiples of.
    """

    alignment: int

    def copy_many(
        self, targets: Numbers, sources: Numbers, sizes: Numbers, stream: int, to_device: bool
    ) -> None:
        """Enqueue runs on a stream; when it raises, some of them may be enqueued."""


class DirectBackend:
    """Moves rows of blocks by the driver alone: the one place where copies are submitted.

    Args:
        layout: the KV tensors' rows.
        slots: in CPU memory registered with the driver.
        copier: makes the copies.

    Raises:
        TransferError: rows or slots are not where the driver can copy.
    """

    name = "direct"
    load_times = None
    groups = ()

    def __init__(self, layout: BlockLayout, slots: SlotMemory, copier: Copier) -> None:
        self._slots, self._copier = slots, copier
        self._device = device_of(layout.device)
        self._rows = np.array([row.data_ptr() for row in layout.rows], dtype=np.int64)
        self._strides = np.array([row.stride(0) for row in layout.rows], dtype=np.int64)
        self._offsets = np.array(layout.offsets, dtype=np.int64)
        self._nbytes = np.array([row.shape[1] for row in layout.rows], dtype=np.int64)
        places = (*self._rows, *self._strides, *self._offsets, slots.pitch, slots.address(0))
        if gcd(*map(int, places)) % copier.alignment:
            raise TransferError(
                f"expected rows of KV blocks and slots at multiples of {copier.alignment} bytes, "
                "found others."
            )
        self._blocks = max(1, STORE_SLICE_BYTES // layout.block_bytes)
        self._joined = self._device.new_event()
        self.checksums = Checksums(0, torch.device("cpu"))

    def store(
        self,
        gpu_block_ids: Sequence[int],
        cpu_slots: Sequence[int],
        streams: Streams | None = None,
    ) -> Slices:
        """Enqueue blocks to slots: each slice is one call of the driver."""
        assert streams is not None
        yield from self._copy(gpu_block_ids, cpu_slots, streams, to_device=False)
        self._joined.record(streams.blocks)
        streams.bus.wait_event(self._joined)
        return None

    def load(
        self,
        gpu_block_ids: Sequence[int],
        cpu_slots: Sequence[int],
        streams: Streams | None = None,
        compared: bool = False,
    ) -> Slices:
        """Enqueue slots to blocks: each slice is one call of the driver."""
        assert streams is not None
        yield from self._copy(gpu_block_ids, cpu_slots, streams, to_device=True)
        return None

    def _copy(
        self, ids: Sequence[int], slots: Sequence[int], streams: Streams, to_device: bool
    ) -> Iterator[int]:
        """All of it on the stream of the blocks, behind what the bus has."""
        self._joined.record(streams.bus)
        streams.blocks.wait_event(self._joined)
        for at in range(0, len(ids), self._blocks):
            if at:
                yield 0
            own = slice(at, at + self._blocks)
            blocks, host = self._addresses(ids[own], slots[own])
            target, source = (blocks, host) if to_device else (host, blocks)
            sizes = np.tile(self._nbytes, len(ids[own]))
            stream = self._device.handle(streams.blocks)
            self._copier.copy_many(target, source, sizes, stream, to_device)

    def _addresses(self, ids: Sequence[int], slots: Sequence[int]) -> tuple[Numbers, Numbers]:
        """Of every row of every block, and of its place in the slot."""
        block_ids = np.array(ids, dtype=np.int64)[:, None]
        places = np.array(slots, dtype=np.int64)[:, None]
        blocks = self._rows + block_ids * self._strides
        host = self._slots.address(places) + self._offsets
        return blocks.reshape(-1), host.reshape(-1)
