"""The two streams on which the copies of a direction cross the bus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvoffload_patch.transfer.device import Device


class AlternatingStreams:
    """Two streams in turn for a direction's pieces, so that others' copies come in between.

    A direction's copy engine keeps to a stream for as long as that has a copy which could
    begin, and each step's tokens or inputs would wait for all that is enqueued. A piece on another
    stream that waits for the one before makes it look around (scripts/bench copy_queue).
    """

    def __init__(self, device: Device) -> None:
        self._aside = device.new_stream()
        self._device = device
        self._before, self._after = device.new_event(), device.new_event()
        self._is_aside = False

    def enqueue(self, bus: Any, copy: Callable[[slice, int], None], piece: slice) -> None:
        """Call ``copy`` with a piece, and the handle of the stream for it.

        It is behind ``bus``, and ``bus`` is behind it afterwards.
        """
        self._is_aside = not self._is_aside
        if not self._is_aside:
            copy(piece, self._device.handle(bus))
            return
        self._before.record(bus)
        self._aside.wait_event(self._before)
        try:
            copy(piece, self._device.handle(self._aside))
        finally:
            self._after.record(self._aside)
            bus.wait_event(self._after)
