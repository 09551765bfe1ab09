"""The torch copy backend: for the CPU device, and as the fallback on any other."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from kvoffload_patch.transfer.backends.base import Slices, Streams
from kvoffload_patch.transfer.backends.ids import IdUploader
from kvoffload_patch.transfer.backends.slots import Run, SlotMemory
from kvoffload_patch.transfer.device import device_of
from kvoffload_patch.transfer.integrity import Checksums, Verdict
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.tuning import STAGING_BYTES


class TorchBackend:
    """Moves whole blocks between the rows of a layout and CPU slots, by torch's own copies.

    On the CPU blocks are copied directly, at once. On a device they are packed in a staging
    buffer in device memory, and each run of neighbouring slots crosses the bus as one copy.

    Args:
        layout: the KV tensors' rows.
        slots: the CPU slots.
        checksums: of the slots, `HostChecksums`; None for none. On the CPU device only.

    Raises:
        torch.OutOfMemoryError: no room for the staging buffers; later copies take no memory.
    """

    name = "torch"
    load_times = None
    groups = ()

    def __init__(
        self, layout: BlockLayout, slots: SlotMemory, checksums: HostChecksums | None = None
    ) -> None:
        self._rows = layout.rows
        self._memory = slots
        self._slots = slots.slots
        self._spans = [slice(o, o + r.shape[1]) for o, r in zip(layout.offsets, layout.rows)]
        self._device = layout.device
        self._streams = device_of(layout.device)
        self._direct = self._streams.is_host
        self.checksums = checksums or HostChecksums(0, layout)
        if not self._direct:
            self._new_staging(layout, max(1, STAGING_BYTES // layout.block_bytes))

    def _new_staging(self, layout: BlockLayout, chunk: int) -> None:
        # As far apart as slots are: one run of slots is one run of bytes on both sides.
        shape = (chunk, self._memory.pitch)
        self._chunk = chunk
        self._stage_store = torch.empty(shape, dtype=torch.uint8, device=self._device)
        self._stage_load = torch.empty(shape, dtype=torch.uint8, device=self._device)
        self._store_ids, self._load_ids = (
            IdUploader(self._device, layout.num_blocks, chunk, _upload) for _ in range(2)
        )
        self._joined = self._streams.new_event()

    def store(
        self,
        gpu_block_ids: Sequence[int],
        cpu_slots: Sequence[int],
        streams: Streams | None = None,
    ) -> Slices:
        """Copy blocks of the device into slots."""
        if self._direct:
            blocks, slots = _index(gpu_block_ids), _index(cpu_slots)
            for row, span in zip(self._rows, self._spans):
                self._slots[:, span][slots] = row[blocks]
            if self.checksums.kept:
                self.checksums.store(blocks, slots)
            return None
        self._join(streams, before=True)
        for at in range(0, len(gpu_block_ids), self._chunk):
            if at:
                yield 0
            with self._on(streams):
                self._store_chunk(
                    gpu_block_ids[at : at + self._chunk], cpu_slots[at : at + self._chunk]
                )
        self._join(streams, before=False)
        return None

    def load(
        self,
        gpu_block_ids: Sequence[int],
        cpu_slots: Sequence[int],
        streams: Streams | None = None,
        compared: bool = False,
    ) -> Slices:
        """Copy slots into blocks of the device."""
        if self._direct:
            blocks, slots = _index(gpu_block_ids), _index(cpu_slots)
            for row, span in zip(self._rows, self._spans):
                row[blocks] = self._slots[:, span][slots]
            if compared and self.checksums.kept:
                return self.checksums.compare(blocks, slots)
            return None
        self._join(streams, before=True)
        if streams is not None and not self._streams.registers:
            streams.bus.synchronize()  # nothing but stores to wait for is there, as a rule done
        for at in range(0, len(gpu_block_ids), self._chunk):
            if at:
                yield 0
            with self._on(streams):
                self._load_chunk(
                    gpu_block_ids[at : at + self._chunk], cpu_slots[at : at + self._chunk]
                )
        return None

    def _store_chunk(self, ids: Sequence[int], slots: Sequence[int]) -> None:
        blocks, staging = self._upload(self._store_ids, ids), self._stage_store
        for row, span in zip(self._rows, self._spans):
            torch.index_select(row, 0, blocks, out=staging[: len(ids), span])
        for run in self._runs(slots):
            self._memory.span(run).copy_(
                staging[run.at : run.at + run.size].view(-1), non_blocking=True
            )

    def _load_chunk(self, ids: Sequence[int], slots: Sequence[int]) -> None:
        blocks, staging = self._upload(self._load_ids, ids), self._stage_load
        for run in self._runs(slots):
            staging[run.at : run.at + run.size].view(-1).copy_(
                self._memory.span(run), non_blocking=True
            )
        for row, span in zip(self._rows, self._spans):
            row[blocks] = staging[: len(ids), span]

    def _upload(self, uploader: IdUploader, ids: Sequence[int]) -> torch.Tensor:
        numbers = np.array(ids, dtype=np.int64)
        return uploader.upload(numbers, self._streams.current_stream())[: len(ids)]

    def _runs(self, slots: Sequence[int]) -> Iterator[Run]:
        for part in self._memory.parts(np.array(slots, dtype=np.int64), len(slots)):
            yield from part.runs()

    def _on(self, streams: Streams | None) -> AbstractContextManager[Any]:
        return self._streams.on(None if streams is None else streams.blocks)

    def _join(self, streams: Streams | None, before: bool) -> None:
        """Everything runs on one stream here: make the other one wait for it, or it for that."""
        if streams is not None:
            first, second = (streams.bus, streams.blocks)
            if not before:
                first, second = second, first
            self._joined.record(first)
            second.wait_event(self._joined)


class HostChecksums(Checksums):
    """Checksums of blocks on the CPU device: CRC-32, as zlib has it, of their rows in order.

    Args:
        num_slots: of the rank.
        layout: of the blocks.
        complete: as `Checksums` takes it.
    """

    def __init__(self, num_slots: int, layout: BlockLayout, complete: bool = True) -> None:
        super().__init__(num_slots, torch.device("cpu"), complete)
        self._noted = self.sums.numpy()
        self._rows = [row.numpy() for row in layout.rows] if num_slots else []

    def store(self, block_ids: torch.Tensor, slots: torch.Tensor) -> None:
        """Note those of blocks that are stored in these slots."""
        self._noted[slots.numpy()] = [self._of(block) for block in block_ids.tolist()]

    def compare(self, block_ids: torch.Tensor, slots: torch.Tensor) -> Verdict:
        """Compare those of blocks that were loaded from these slots."""
        found = [
            slot
            for block, slot, noted in zip(
                block_ids.tolist(), slots.tolist(), self._noted[slots.numpy()].tolist()
            )
            if (noted or self.complete) and self._of(block) != noted
        ]
        return lambda: self.found(found[0]) if found else None

    def _of(self, block: int) -> int:
        """Never 0, which says that there is none."""
        checksum = 0
        for row in self._rows:
            checksum = zlib.crc32(row[block], checksum)
        return checksum | 1 << 32


def _index(ids: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(ids, dtype=np.int64))


def _upload(
    pinned: torch.Tensor, target: torch.Tensor, first: int, count: int, _current: Any
) -> None:
    target[:count].copy_(pinned[first : first + count], non_blocking=True)
