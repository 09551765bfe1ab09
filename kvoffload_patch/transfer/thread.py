"""The thread that enqueues copies beside the step, slice by slice, loads first."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Union

from kvoffload_patch.threads import EXIT_S, JoinedThread
from kvoffload_patch.transfer.device import Device
from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.queue import CopyQueue, SyncCopyQueue
from kvoffload_patch.transfer.tuning import THREAD_LOAD_SLICES, THREAD_SLEEP_S, THREAD_STORE_SLICES

_Queue = Union[CopyQueue, SyncCopyQueue]


class CopyThread:
    """Enqueues what is queued, until it is closed.

    It stays a few slices ahead of the device in each direction, so that the bus is never idle and a
    large store is not before a load that comes after it. The bus goes both ways at once, so neither
    direction waits for the other.

    Args:
        device: of the copies.
        loads: queues of the links into the GPU, which requests wait for.
        stores: all others.
    """

    def __init__(self, device: Device, loads: Sequence[_Queue], stores: Sequence[_Queue]) -> None:
        self._device = device
        self._loads = loads
        self._stores = stores
        self._queues = [*loads, *stores]
        self._wake = threading.Event()
        self._closing = False
        self._error: BaseException | None = None
        self._thread = JoinedThread(self._run, "kvoffload-copies", self._end)
        self._thread.start()

    def wake(self) -> None:
        """There is something to enqueue.

        Raises:
            TransferError: the thread has ended, so nothing would be.
        """
        if self._error is not None:
            raise TransferError(
                f"the copy thread has ended ({self._error}), so the CPU tier stops here; "
                "restart the server."
            ) from self._error
        self._wake.set()

    def close(self) -> None:
        """End the thread; what is queued stays queued."""
        self._end()
        self._thread.join(EXIT_S)  # it may be in a driver that never returns

    def _end(self) -> None:
        self._closing = True
        self._wake.set()

    def _run(self) -> None:
        try:
            self._device.use()
            while not self._closing:
                self._wake.wait()
                self._wake.clear()
                while not self._closing and any([queue.queued for queue in self._queues]):
                    self._advance()
        except BaseException as error:  # noqa: BLE001 - said by the next `wake`
            self._error = error

    def _advance(self) -> None:
        """Enqueue loads, then a slice of each store, as there is room; or nap."""
        enqueued = False
        for queue in self._loads:
            enqueued |= queue.top_up(THREAD_LOAD_SLICES)
        for queue in self._stores:
            enqueued |= queue.has_room(THREAD_STORE_SLICES) and queue.advance()
        if not enqueued:
            self._wake.wait(THREAD_SLEEP_S)  # or until there is more to enqueue
            self._wake.clear()
