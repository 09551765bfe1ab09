"""Block and slot numbers on their way to the device."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import triton

from kvoffload_patch.transfer.backends.kernels import copy_ids
from kvoffload_patch.transfer.backends.slots import Numbers
from kvoffload_patch.transfer.device import device_of
from kvoffload_patch.transfer.tuning import IDS_BLOCKS, IDS_PROGRAM_BLOCKS


class IdUploader:
    """Brings numbers to the device by a kernel that reads CPU memory.

    Not by a copy: the copy engine of a direction is one queue for the whole device, so that the
    few numbers of a store would wait there for a slice of a load (docs/performance.md).

    Args:
        device: where to.
        capacity: numbers under way at most; more wait for those before them.
    """

    def __init__(self, device: torch.device, capacity: int = IDS_BLOCKS) -> None:
        self._device, self._streams = device, device_of(device)
        self._capacity = capacity
        self._next = 0
        # Places in use: begin, end, and the event after which they are free; oldest first.
        self._used: deque[tuple[int, int, Any]] = deque()
        if not self._streams.is_host:
            self._pinned = torch.empty(capacity, dtype=torch.int64, pin_memory=True)

    def upload(self, ids: Numbers, stream: Any) -> torch.Tensor:
        """The numbers on the device, for what is enqueued on ``stream`` from now on."""
        if self._streams.is_host:
            return torch.from_numpy(ids)
        with self._streams.on(stream):
            uploaded = torch.empty(len(ids), dtype=torch.int64, device=self._device)
            for at in range(0, len(ids), self._capacity // 2):
                part = ids[at : at + self._capacity // 2]
                begin = self._place(len(part))
                self._pinned.numpy()[begin : begin + len(part)] = part
                grid = (triton.cdiv(len(part), IDS_PROGRAM_BLOCKS),)
                copy_ids[grid](
                    self._pinned, uploaded, begin, at, len(part), SIZE=IDS_PROGRAM_BLOCKS
                )
                event = self._streams.new_event()
                event.record(stream)
                self._used.append((begin, begin + len(part), event))
        return uploaded

    def _place(self, count: int) -> int:
        """Where ``count`` numbers can be written; waits for those that are still read there."""
        begin = self._next if self._next + count <= self._capacity else 0
        self._next = begin + count
        while self._used and (
            self._used[0][2].query()
            or any(used < begin + count and end > begin for used, end, _ in self._used)
        ):
            self._used.popleft()[2].synchronize()
        return begin
