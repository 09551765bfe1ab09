"""Block numbers on their way to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from kvoffload_patch.transfer.backends.slots import Numbers
from kvoffload_patch.transfer.device import device_of


class IdUploader:
    """Brings the numbers of blocks to the device, for one direction of copies.

    All memory is taken when it is made. The numbers wait in a ring in pinned memory, whose places
    are free again once the device has read them. On the device they are in one place: the next ones
    are written there on the same stream, so behind the copies that read these.

    Args:
        device: where to.
        under_way: so many numbers may wait to be read before the host waits for the first of them.
        batch: numbers of an upload at most.
        copy: enqueues a copy of ``count`` numbers; called with their tensor in pinned memory, the
            one on the device, the first one's place, ``count``, and the stream.

    Raises:
        torch.OutOfMemoryError: no room on the device.
    """

    def __init__(
        self,
        device: torch.device,
        under_way: int,
        batch: int,
        copy: Callable[[torch.Tensor, torch.Tensor, int, int, Any], None],
    ) -> None:
        self._device = device_of(device)
        self._copy = copy
        # What does not fit in at the end of the ring leaves less than a batch unused there.
        self._capacity = under_way + 2 * batch
        on_host = {"dtype": torch.int64, "pin_memory": device.type != "cpu"}
        self._pinned: torch.Tensor = torch.empty(self._capacity, **on_host)
        self._written = self._pinned.numpy()
        self._ids = torch.empty(batch, dtype=torch.int64, device=device)
        self._stream: Any = None  # of the last upload
        # Places count on from lap to lap. What is not read yet: its end, and the event after which
        # it is; oldest first.
        self._given = self._free = 0
        self._unread: deque[tuple[int, Any]] = deque()
        self._spare: list[Any] = []

    def upload(self, ids: Numbers, stream: Any) -> torch.Tensor:
        """The numbers on the device, ``int64 [batch]``, of which the first ``len(ids)`` count.

        They are there for what is enqueued on ``stream`` until the next call.
        """
        count = len(ids)
        begin = self._place(count)
        self._written[begin : begin + count] = ids
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream
        self._copy(self._pinned, self._ids, begin, count, stream)
        event = self._spare.pop() if self._spare else self._device.new_event()
        event.record(stream)
        self._unread.append((self._given, event))
        return self._ids

    def _place(self, count: int) -> int:
        """Where ``count`` numbers can be written; waits for those that are still read there."""
        begin = self._given % self._capacity
        if begin + count > self._capacity:
            self._given += self._capacity - begin
            begin = 0
        self._given += count
        while self._unread and (
            self._unread[0][1].query() or self._given - self._free > self._capacity
        ):
            self._free, event = self._unread.popleft()
            event.synchronize()
            self._spare.append(event)
        return begin
