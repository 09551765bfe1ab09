"""How long loads take while the tier serves, by the device's own clock."""

from __future__ import annotations

from collections import deque
from typing import Any

from kvoffload_patch.transfer.device import Device
from kvoffload_patch.transfer.tuning import LOAD_TIMES_BYTES


class LoadTimes:
    """A moving average over the slices of loads, for the estimates of the engine's side.

    The first slices of a load fill the staging buffers while the step before it may still compute,
    and the next one waits for that step. From the end of that one to the end of the last, a slice
    waits for the bus, for others that use it, and for the host that enqueues it, and for nothing
    else: this is what is averaged. A load with no more slices than these says nothing.

    Args:
        device: of the copies.
        buffers: that the slices fill in turn.
    """

    def __init__(self, device: Device, buffers: int) -> None:
        self._device = device
        self._uncounted = buffers + 1
        self._slices = self._bytes = 0
        self._first: Any = None
        # Two events and the bytes between them, of loads whose end is not known.
        self._under_way: deque[tuple[Any, Any, int]] = deque()
        self._spare: list[Any] = []
        self._ms_per_byte = 0.0

    def start_from(self, ms_per_byte: float) -> None:
        """Take the average for this, and forget the loads so far: kernels were compiled in them."""
        self._under_way.clear()
        self._ms_per_byte = ms_per_byte

    def begin(self) -> None:
        """A load begins; one before it that was given up is forgotten."""
        self._slices = self._bytes = 0
        if self._first is not None:
            self._spare.append(self._first)
            self._first = None

    def crossed(self, nbytes: int, bus: Any) -> None:
        """All that has to cross for a slice of so many bytes is on the stream of the bus."""
        self._slices += 1
        if self._slices > self._uncounted:
            self._bytes += nbytes
        elif self._slices == self._uncounted:
            self._first = self._recorded(bus)

    def end(self, bus: Any) -> None:
        """The load's last slice is on the stream."""
        if self._bytes:
            self._under_way.append((self._first, self._recorded(bus), self._bytes))
            self._first = None

    def ms_per_byte(self) -> float:
        """Milliseconds that a byte takes; 0 if nothing was measured. Never waits."""
        while self._under_way and self._under_way[0][1].query():
            first, last, nbytes = self._under_way.popleft()
            ms = first.elapsed_time(last) / nbytes
            weight = nbytes / (nbytes + LOAD_TIMES_BYTES) if self._ms_per_byte else 1.0
            self._ms_per_byte += weight * (ms - self._ms_per_byte)
            self._spare += (first, last)
        return self._ms_per_byte

    def _recorded(self, stream: Any) -> Any:
        try:
            event = self._spare.pop()  # one thread enqueues while another one reads
        except IndexError:
            event = self._device.new_event(timed=True)
        event.record(stream)
        return event
