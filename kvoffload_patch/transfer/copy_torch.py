"""The torch copy backend: for the CPU device, and as the fallback on any other.

It enqueues on the current stream and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvoffload_patch.transfer.layout import BlockLayout

STAGING_BYTES = 32 << 20


class TorchBackend:
    """Moves whole blocks between the rows of a layout and CPU slots.

    On the CPU blocks are copied directly. On a device they are packed in a staging buffer in
    device memory, and each run of neighbouring slots crosses the bus as one copy.

    Args:
        layout: the KV tensors' rows.
        slots: ``uint8 [num_slots, block_bytes]`` in CPU memory.
    """

    def __init__(self, layout: BlockLayout, slots: torch.Tensor) -> None:
        self._rows = layout.rows
        self._slots = slots
        self._parts = [slots[:, o : o + r.shape[1]] for o, r in zip(layout.offsets, self._rows)]
        self._device = layout.device
        self._direct = layout.device.type == "cpu"
        if not self._direct:
            self._chunk = max(1, STAGING_BYTES // layout.block_bytes)
            self._stage_store = self._new_staging(layout)
            self._stage_load = self._new_staging(layout)

    def store(self, gpu_block_ids: Sequence[int], cpu_slots: Sequence[int]) -> None:
        """Copy blocks of the device into slots."""
        if self._direct:
            blocks, slots = self._index(gpu_block_ids), self._index(cpu_slots)
            for row, part in zip(self._rows, self._parts):
                part[slots] = row[blocks]
            return
        for ids, slots_of in _chunks(gpu_block_ids, cpu_slots, self._chunk):
            blocks = self._index(ids)
            staging, views = self._stage_store
            for row, view in zip(self._rows, views):
                view[: len(ids)].copy_(row[blocks])
            for at, first, size in _runs(slots_of):
                target = self._slots[first : first + size]
                target.copy_(staging[at : at + size], non_blocking=True)

    def load(self, gpu_block_ids: Sequence[int], cpu_slots: Sequence[int]) -> None:
        """Copy slots into blocks of the device."""
        if self._direct:
            blocks, slots = self._index(gpu_block_ids), self._index(cpu_slots)
            for row, part in zip(self._rows, self._parts):
                row[blocks] = part[slots]
            return
        for ids, slots_of in _chunks(gpu_block_ids, cpu_slots, self._chunk):
            blocks = self._index(ids)
            staging, views = self._stage_load
            for at, first, size in _runs(slots_of):
                source = self._slots[first : first + size]
                staging[at : at + size].copy_(source, non_blocking=True)
            for row, view in zip(self._rows, views):
                row[blocks] = view[: len(ids)]

    def _index(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.long).to(self._device, non_blocking=True)

    def _new_staging(self, layout: BlockLayout) -> tuple[torch.Tensor, list[torch.Tensor]]:
        shape = (self._chunk, layout.block_bytes)
        staging = torch.empty(shape, dtype=torch.uint8, device=self._device)
        views = [staging[:, o : o + r.shape[1]] for o, r in zip(layout.offsets, self._rows)]
        return staging, views


def _chunks(
    ids: Sequence[int], slots: Sequence[int], size: int
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    for at in range(0, len(ids), size):
        yield ids[at : at + size], slots[at : at + size]


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of neighbours: (index of the first, its slot, how many)."""
    begin = 0
    for i in range(1, len(slots) + 1):
        if i == len(slots) or slots[i] != slots[i - 1] + 1:
            yield begin, slots[begin], i - begin
            begin = i
