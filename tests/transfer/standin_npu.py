"""A stand-in for an Ascend NPU: `torch.npu` and libascendcl.so, over threads and the CPU's memory.

The library is compiled from standin_ascendcl.c. As torch_npu does, the stand-in for `torch.npu`
hands records and waits to the device later, from a queue on the host, which is emptied when a
stream is asked for its handle.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvoffload_patch.transfer import device as devices
from kvoffload_patch.transfer.backends import acl
from kvoffload_patch.transfer.devices import npu

SOURCE = Path(__file__).with_name("standin_ascendcl.c")
INDEX = 7  # of the device; the library knows no other one
_CALL = ctypes.CFUNCTYPE(None)

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None, reason="needs a C compiler (cc) for the stand-in of AscendCL"
)


def compiled(folder: Path, old: bool = False, oldest: bool = False) -> Path:
    """The library, as CANN 8.5 has it, or older."""
    target = folder / f"ascendcl-{old:d}{oldest:d}" / "libascendcl.so"
    if not target.exists():
        target.parent.mkdir(parents=True)
        defined = [*(["-DOLD"] if old else []), *(["-DOLDEST"] if oldest else [])]
        command = ["cc", "-shared", "-fPIC", "-O1", "-pthread", *defined]
        subprocess.run([*command, "-o", str(target), str(SOURCE)], check=True)
    return target


class Stream:
    def __init__(self, on: StandinNpu) -> None:
        self._on = on
        self._handle = on.library.standin_new_stream()

    @property
    def npu_stream(self) -> int:
        self._on.hand_over()
        return int(self._handle)

    def wait_event(self, event: Event) -> None:
        if event.recorded:
            self._on.queue(lambda: self._on.library.standin_wait(self._handle, event.handle))

    def wait_stream(self, other: Stream) -> None:
        event = Event(self._on)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self._on.hand_over()
        self._on.library.standin_finish(self._handle)


class Event:
    def __init__(self, on: StandinNpu) -> None:
        self._on = on
        handle = ctypes.c_void_p()
        assert on.library.aclrtCreateEventExWithFlag(ctypes.byref(handle), 1) == 0  # ACL_EVENT_SYNC
        self.handle = handle.value
        self.recorded = False
        self._waiting = 0  # records that are not handed over

    def record(self, stream: Stream | None = None) -> None:
        into = stream or self._on.current
        self.recorded = True
        self._waiting += 1

        def hand_over() -> None:
            self._on.library.standin_record(self.handle, into._handle)
            self._waiting -= 1

        self._on.queue(hand_over)

    def query(self) -> bool:
        self._on.some_time_passes()
        return not self._waiting and bool(self._on.library.standin_is_done(self.handle))

    def synchronize(self) -> None:
        self._on.hand_over()
        self._on.library.standin_finish_event(self.handle)


class StandinNpu:
    """What is `torch.npu` meanwhile."""

    def __init__(self, library: Any) -> None:
        self.library = library
        library.standin_new_stream.restype = ctypes.c_void_p
        for name in ("record", "wait", "is_done", "finish_event", "finish"):
            getattr(library, f"standin_{name}").argtypes = [ctypes.c_void_p] * (
                2 if name in ("record", "wait") else 1
            )
        library.standin_call.argtypes = [ctypes.c_void_p, _CALL]
        self._queue: list[Callable[[], object]] = []
        self._lock = threading.RLock()
        self._asked = 0
        self._calls: list[Any] = []  # the library has their addresses
        self.used: set[tuple[int, object]] = set()
        self.current = Stream(self)

    def __getattr__(self, name: str) -> int:
        """The library's counters."""
        return ctypes.c_int.in_dll(self.library, f"standin_{name}").value

    def put(self, **numbers: int) -> None:
        """Set the library's numbers."""
        for name, value in numbers.items():
            ctypes.c_int.in_dll(self.library, f"standin_{name}").value = value

    def queue(self, call: Callable[[], object]) -> None:
        with self._lock:
            self._queue.append(call)

    def hand_over(self) -> None:
        with self._lock:
            while self._queue:
                self._queue.pop(0)()

    def some_time_passes(self) -> None:
        """The thread that hands work over comes to it now and then."""
        self._asked += 1
        if self._asked % 3 == 0:
            self.hand_over()

    def compute(self, call: Callable[[], None]) -> None:
        """Work of the current stream, done late, by a thread of the stand-in."""
        made, stream = _CALL(call), self.current
        self._calls.append(made)
        self.queue(lambda: self.library.standin_call(stream._handle, made))

    # What torch.npu has.

    def Stream(self, device: Any = None) -> Stream:
        return Stream(self)

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    def current_device(self) -> int:
        return INDEX

    def set_device(self, device: Any) -> None:
        self.used.add((threading.get_ident(), device))

    def synchronize(self, device: Any = None) -> None:
        self.hand_over()
        self.library.standin_finish(None)

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        yield
        self.current = before


@contextmanager
def standin(folder: Path, old: bool = False) -> Iterator[StandinNpu]:
    """While this is entered, tensors on the CPU are on an NPU, whose AscendCL is the stand-in."""
    path = compiled(folder, old)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acl, "LIBRARY", str(path))
        made = StandinNpu(ctypes.CDLL(str(path)))
        numbers = ("batches", "singles", "copies", "plain", "at_once", "batch_error", "delay_us")
        made.put(**dict.fromkeys(numbers, 0), fail_in=-1)
        patch.setattr(npu, "KERNEL", "6.1.0")
        patch.setattr(torch, "npu", made, raising=False)
        kinds = {"cpu": lambda device: npu.NpuDevice(torch.device("cpu"))}
        patch.setattr(devices, "_KINDS", kinds)
        yield made
        made.synchronize()
