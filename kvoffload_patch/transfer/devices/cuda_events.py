"""CUDA events by the driver, through ctypes, which gives the GIL up for the length of a call.

torch keeps the GIL while it records or queries an event, and both can wait in the driver: behind a
stream that hangs, a launch waits once the driver has no room for it, and other calls wait for that
launch. No thread of Python would run then, that which ends such a process included
(`transfer/deadline.py`).
"""

from __future__ import annotations

import ctypes
from typing import Any

from kvoffload_patch.transfer.errors import TransferError

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_DEFAULT, _DISABLE_TIMING = 0, 2  # CU_EVENT_DEFAULT, CU_EVENT_DISABLE_TIMING


class EventCalls:
    """The driver's calls for events.

    Raises:
        TransferError: no NVIDIA driver is loaded, or a call has failed.
    """

    def __init__(self) -> None:
        try:
            library: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransferError(
                f"expected the NVIDIA driver's libcuda.so.1, found {error}."
            ) from error
        pointer = ctypes.c_void_p
        self._create, self._create.argtypes = library.cuEventCreate, [pointer, ctypes.c_uint]
        self._record, self._record.argtypes = library.cuEventRecord, [pointer, pointer]
        self._wait = library.cuStreamWaitEvent
        self._wait.argtypes = [pointer, pointer, ctypes.c_uint]
        self._event_query, self._event_query.argtypes = library.cuEventQuery, [pointer]
        self._stream_query, self._stream_query.argtypes = library.cuStreamQuery, [pointer]
        self._synchronize, self._synchronize.argtypes = library.cuEventSynchronize, [pointer]
        self._elapsed = library.cuEventElapsedTime
        self._elapsed.argtypes = [pointer, pointer, pointer]
        self._destroy, self._destroy.argtypes = library.cuEventDestroy_v2, [pointer]

    def create(self, timed: bool) -> int:
        """An event of the current context."""
        event = ctypes.c_void_p()
        flags = _DEFAULT if timed else _DISABLE_TIMING
        _check(self._create(ctypes.byref(event), flags), "cuEventCreate")
        return event.value or 0

    def record(self, event: int, stream: int) -> None:
        """Behind what the stream was given so far."""
        _check(self._record(event, stream), "cuEventRecord")

    def wait(self, stream: int, event: int) -> None:
        """What the stream is given from now on waits for the event as it was recorded last."""
        _check(self._wait(stream, event, 0), "cuStreamWaitEvent")

    def event_over(self, event: int) -> bool:
        """Whether it has come."""
        return _over(self._event_query(event), "cuEventQuery")

    def stream_over(self, stream: int) -> bool:
        """Whether all is done that the stream was given."""
        return _over(self._stream_query(stream), "cuStreamQuery")

    def synchronize(self, event: int) -> None:
        """Wait, on the host, until it has come."""
        _check(self._synchronize(event), "cuEventSynchronize")

    def elapsed_ms(self, first: int, last: int) -> float:
        """Milliseconds between two timed events that have come."""
        found = ctypes.c_float()
        _check(self._elapsed(ctypes.byref(found), first, last), "cuEventElapsedTime")
        return found.value

    def destroy(self, event: int) -> None:
        """It need not have come."""
        self._destroy(event)


class CudaEvent:
    """An event with the methods of torch's that `Device.new_event` names, and for its streams.

    Args:
        calls: of the driver.
        timed: whether it has a time.
    """

    __slots__ = ("_calls", "_handle", "_timed")

    def __init__(self, calls: EventCalls, timed: bool) -> None:
        self._calls = calls
        self._timed = timed
        self._handle = 0  # made by the first thread that records it, which has the device

    def record(self, stream: Any) -> None:
        """Behind what a stream of torch's was given so far."""
        if not self._handle:
            self._handle = self._calls.create(self._timed)
        self._calls.record(self._handle, stream.cuda_stream)

    def wait(self, stream: Any) -> None:
        """As torch's ``Stream.wait_event`` calls it."""
        if self._handle:
            self._calls.wait(stream.cuda_stream, self._handle)

    def query(self) -> bool:
        """Whether it has come, or was never recorded."""
        return not self._handle or self._calls.event_over(self._handle)

    def synchronize(self) -> None:
        """Wait, on the host, until it has come."""
        if self._handle:
            self._calls.synchronize(self._handle)

    def elapsed_time(self, last: CudaEvent) -> float:
        """Milliseconds from this one to the other; both are timed and have come."""
        return self._calls.elapsed_ms(self._handle, last._handle)

    def __del__(self) -> None:
        if self._handle:
            self._calls.destroy(self._handle)


def _over(error: int, call: str) -> bool:
    if error == _NOT_READY:
        return False
    _check(error, call)
    return True


def _check(error: int, call: str) -> None:
    if error:
        raise TransferError(
            f"expected the CUDA driver to carry out {call}, found error {error}, so the CPU tier "
            "stops here; restart the server."
        )
