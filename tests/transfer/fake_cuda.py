"""Streams, events and a driver of the CPU: work is done late, in any order that the waits allow.

A wait that is missing shows as bytes that are wrong, for some seed. While a `FakeCuda` is entered,
it is the device of tensors on the CPU; kernels wait for their turn, and steps enqueue few slices,
so that much stays queued.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from kvoffload_patch.transfer import device as devices
from kvoffload_patch.transfer import engine as copy_engine
from kvoffload_patch.transfer import queue as copy_queue
from kvoffload_patch.transfer.backends import staged as copy_staged
from kvoffload_patch.transfer.backends.driver import Runs, RunsOfRows
from kvoffload_patch.transfer.backends.slots import Numbers, SlotMemory
from kvoffload_patch.transfer.backends.tiles import TileMover
from kvoffload_patch.transfer.errors import TransferError


@dataclass
class Wait:
    """A place in a queue that is passed once this holds."""

    until: Callable[[], bool]


class FakeStream:
    """A queue of calls and waits."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.number = len(cuda.streams) + 1
        self.work: deque[Any] = deque()
        self.given = self.done = 0

    def append(self, call: Callable[[], object]) -> None:
        self.given += 1
        self.work.append(call)

    def wait_event(self, event: FakeEvent) -> None:
        if event.until is not None:
            self.work.append(Wait(event.until))

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(FakeEvent(self._cuda).record(other))

    def can_go_on(self) -> bool:
        while self.work and isinstance(self.work[0], Wait):
            if not self.work[0].until():
                return False
            self.work.popleft()
        return bool(self.work)

    def go_on(self) -> None:
        call = self.work.popleft()
        call()
        self.done += 1
        self._cuda.pieces += 1

    def end(self, reached: Callable[[], object] = int) -> Callable[[], bool]:
        """What holds once all that the stream has been given so far is done, waits included.

        ``reached`` is called then.
        """
        self.append(reached)
        upto = self.given
        return lambda: self.done >= upto

    def synchronize(self) -> None:
        self._cuda.run_until(self.end())


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.until: Callable[[], bool] | None = None
        self.at = 0  # pieces of work that the device had done by then

    def record(self, stream: FakeStream | None = None) -> FakeEvent:
        self.until = (stream or self._cuda.current).end(self._reached)
        return self

    def _reached(self) -> None:
        self.at = self._cuda.pieces

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds, one for each piece of work."""
        assert self.query() and end.query(), "it is asked of events that have come"
        return float(end.at - self.at)

    def query(self) -> bool:
        return self.until is None or self.until()

    def synchronize(self) -> None:
        self._cuda.run_until(self.query)


class FakeCuda:
    """A `Device` whose memory is the CPU's; ``with`` makes it that of tensors there.

    Args:
        seed: of the order in which streams go on.
    """

    is_host = True  # what is copied without streams is copied at once
    registers = True

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.pieces = 0
        self.streams: list[FakeStream] = []
        self.current = self.new_stream()
        self._entered: list[mock._patch[Any]] = []

    def new_stream(self, priority: int = 0) -> FakeStream:
        stream = FakeStream(self)
        self.streams.append(stream)
        return stream

    def new_event(self, timed: bool = False) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self) -> FakeStream:
        return self.current

    def current_stream_id(self) -> int:
        return self.current.number

    def use(self) -> None:
        pass

    def handle(self, stream: FakeStream) -> int:
        return stream.number

    def synchronize(self) -> None:
        self.run()

    @contextmanager
    def on(self, stream: FakeStream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        yield
        self.current = before

    def run_one(self, favourite: int | None = None) -> bool:
        """Do one piece of work; False if there is none.

        Args:
            favourite: the stream to go on with, if it can.
        """
        if favourite is not None:
            first = self.streams[favourite % len(self.streams)]
            if first.can_go_on():
                first.go_on()
                return True
        busy = [stream for stream in self.streams if stream.work]
        self.random.shuffle(busy)
        for stream in busy:
            if stream.can_go_on():
                stream.go_on()
                return True
        assert self.idle, "the streams wait for each other"
        return False

    def run(self) -> None:
        """Do all there is."""
        self.run_until(lambda: False)

    def run_until(self, reached: Callable[[], bool]) -> None:
        """One stream goes on for a while, then another one: that makes the others late."""
        favourite = self.random.randrange(len(self.streams))
        while not reached() and self.run_one(favourite):
            if self.random.random() < 0.2:
                favourite = self.random.randrange(len(self.streams))

    @property
    def idle(self) -> bool:
        return not any(stream.work for stream in self.streams)

    def __enter__(self) -> FakeCuda:
        self._put(devices, _KINDS={"cpu": lambda device: self})
        # While the host naps, the device goes on.
        self._put(copy_queue, time=SimpleNamespace(sleep=lambda seconds: self.run_one()))
        clear = TileMover.clear
        self._put(
            TileMover,
            move=self._late(TileMover.move, 1),
            clear=lambda *args: self.current.append(partial(clear, *args)),
        )
        made = copy_staged.id_copier
        self._put(copy_staged, id_copier=lambda device: self._late(made(device), 4))
        # Or a step would enqueue all there is: copies are small here.
        self._put(
            copy_engine,
            STEP_LOAD_SLICES=2, THREAD_LOAD_SLICES=1, STEP_STORE_SLICES=1,
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        for _ in range(5):
            self._entered.pop().stop()

    def _put(self, where: Any, **what: Any) -> None:
        patch = mock.patch.multiple(where, **what)
        patch.start()
        self._entered.append(patch)

    def _late(self, call: Callable[..., None], place: int) -> Callable[..., None]:
        """A call that takes its turn on the stream that its argument in this place is."""
        return lambda *args: args[place].append(partial(call, *args))


class FakeDriver:
    """`Driver` on a `FakeCuda`: moves bytes of the CPU, and refuses what a device cannot do.

    Attributes:
        calls: how many copies each call had; below 0, rows of as many slots.
        fail_in: raise once so many more copies were enqueued; never if None.
    """

    def __init__(self, cuda: FakeCuda, slots: SlotMemory, slots_per_piece: int = 0) -> None:
        self._streams = cuda
        begin, end = slots.address(0), slots.address(slots.slots.shape[0])
        self._begin, self._end = begin, end
        self._piece = (slots_per_piece or slots.slots.shape[0]) * slots.pitch
        self.calls: list[int] = []
        self.fail_in: int | None = None

    def copy_many(self, runs: Runs, which: slice, stream: int) -> None:
        columns = (runs.targets, runs.sources, runs.sizes)
        assert all(c.dtype == np.int64 and c.shape == runs.sizes.shape for c in columns)
        self._copy_all([*zip(*(c[which].tolist() for c in columns))], stream)

    def copy_runs_of_rows(self, runs: RunsOfRows, which: slice, stream: int) -> None:
        columns = (runs.targets, runs.sources, runs.counts)
        assert all(c.dtype in (np.int64, np.uint64) for c in columns)
        assert all(c.shape == runs.counts.shape for c in columns)
        found = [*zip(*(c[which].tolist() for c in columns))]
        self.calls += [-count for _, _, count in found]
        for target, source, count in self._streams.random.sample(found, len(found)):
            self._check(source, (count - 1) * runs.pitch + runs.nbytes)
            for i in range(count):
                at = target + i * runs.nbytes, source + i * runs.pitch
                self._enqueue(*at, runs.nbytes, stream)

    def _copy_all(self, copies: list[tuple[int, ...]], stream: int) -> None:
        self.calls.append(len(copies))
        # A batch has no order within.
        for target, source, nbytes in self._streams.random.sample(copies, len(copies)):
            self._enqueue(target, source, nbytes, stream)

    def _enqueue(self, target: int, source: int, nbytes: int, handle: int) -> None:
        self._check(target, nbytes)
        self._check(source, nbytes)
        if self.fail_in is not None:
            if self.fail_in == 0:
                self.fail_in = None
                raise TransferError("the CUDA driver refused a copy, as the test asked.")
            self.fail_in -= 1
        stream = self._streams.streams[handle - 1]
        assert stream.number == handle
        stream.append(partial(ctypes.memmove, target, source, nbytes))

    def _check(self, address: int, nbytes: int) -> None:
        """Slots are in memory that was registered piece by piece."""
        assert nbytes > 0
        if address < self._end and address + nbytes > self._begin:
            assert self._begin <= address and address + nbytes <= self._end, "beyond the slots"
            first, last = address - self._begin, address + nbytes - 1 - self._begin
            assert first // self._piece == last // self._piece, "from one piece into the next"


class FakeCopier(FakeDriver):
    """The same for a driver that is told the way, and which has to be the one the bytes go."""

    alignment = 1

    def copy_many(  # type: ignore[override]
        self, targets: Numbers, sources: Numbers, sizes: Numbers, stream: int, to_device: bool
    ) -> None:
        host, device = (sources, targets) if to_device else (targets, sources)
        assert all(self._begin <= at < self._end for at in host.tolist()), "the other way"
        assert not any(self._begin <= at < self._end for at in device.tolist())
        columns = (targets, sources, sizes)
        assert all(c.dtype == np.int64 and c.shape == sizes.shape for c in columns)
        self._copy_all([*zip(*(c.tolist() for c in columns))], stream)
