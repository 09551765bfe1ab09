"""One link's order of copies: its streams, what is queued, and which tickets are done."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from kvoffload_patch.links import MISMATCH
from kvoffload_patch.transfer.backends.base import Slices, Streams, finish
from kvoffload_patch.transfer.deadline import Oldest
from kvoffload_patch.transfer.device import Device
from kvoffload_patch.transfer.errors import CopyFailed, CopyLate, TransferError, failed_by
from kvoffload_patch.transfer.integrity import Verdict
from kvoffload_patch.transfer.tuning import POLL_S

Start = Callable[["Streams | None"], Slices]
# Called if a copy fails, whatever has become of it.
Lost = Callable[[], object]
# Queues, and which of their tickets to wait for.
Behind = Sequence[tuple["CopyQueue | SyncCopyQueue", int]]


class _Job:
    """A copy that is queued or partly enqueued."""

    __slots__ = ("arrived", "behind", "compute", "in_slice", "lost", "slices", "start", "ticket")

    def __init__(self, ticket: int, start: Start, compute: Any, behind: Behind, lost: Lost) -> None:
        self.ticket = ticket
        self.start = start
        self.compute = compute
        self.behind = behind
        self.lost = lost
        self.slices: Slices | None = None
        self.arrived: list[Any] = []  # when each group of its rows was
        self.in_slice = False  # a slice was begun, and it is not written down what became of it


class CopyQueue:
    """Copies of one link on a device, in the order of their tickets.

    A copy is queued by `submit`, and enqueued on the streams slice by slice: by a thread beside
    the step (`advance`), or at once by a step that waits for it (`hold`). Its ticket is done when
    the device has finished the last slice, or when the copy has failed and what of it had been
    enqueued is finished.

    Args:
        device: of the copies.
        lock: shared by the queues of a device, which may wait for each other.
        ends_on_bus: whether the end of a copy is on the bus stream, or on that of the blocks.
        slices_ahead: the most that `has_room` and `top_up` are asked for.
        groups: of rows, in which copies come.
        priority: stream priority, as `Device.new_stream` takes it.

    Attributes:
        failed: what went wrong, by ticket, until it is taken away: of a copy that could not be made
            from then on, of one whose bytes are wrong from when it is done.
    """

    def __init__(
        self,
        device: Device,
        lock: threading.RLock,
        ends_on_bus: bool,
        slices_ahead: int,
        groups: int = 0,
        priority: int = 0,
    ) -> None:
        self.streams = Streams(blocks=device.new_stream(priority), bus=device.new_stream(priority))
        self.failed: dict[int, CopyFailed] = {}
        self._end = self.streams.bus if ends_on_bus else self.streams.blocks
        self._device, self._groups = device, groups
        self._lock = lock  # held while a slice is enqueued
        self._book = threading.Lock()  # held for moments: what is under way
        self._queue: deque[_Job] = deque()
        # Last ticket, the compute before it, its end, what to ask then, and its groups of rows.
        self._under_way: deque[tuple[int, Any, Any, Verdict | None, list[Any]]] = deque()
        self._enqueued = 0  # slices so far
        self._spare: list[Any] = []
        self._done = 0
        self._passed = device.new_event()  # compute that was made to wait last no longer waits
        # The ends of the last slices. An event that was never recorded counts as done.
        self._slice_ends = deque(device.new_event() for _ in range(slices_ahead))
        self._joined = device.new_event()

    @property
    def queued(self) -> bool:
        """Whether any copy is not wholly enqueued."""
        return bool(self._queue)

    @property
    def under_way(self) -> bool:
        """Whether any enqueued copy is not known to be done."""
        return bool(self._under_way)

    def submit(self, ticket: int, start: Start, behind: Behind, lost: Lost = int) -> None:
        """Queue a copy.

        It waits for what the current stream has been given before this call, and on the bus for
        tickets of other queues.
        """
        compute = self._new_event()
        compute.record(self._device.current_stream())
        self._queue.append(_Job(ticket, start, compute, behind, lost))

    def advance(self) -> bool:
        """Enqueue the next slice; False if there is none.

        Raises:
            BaseException: what interrupted it, as a key may; the copy has failed.
        """
        with self._lock:
            if not self._queue:
                return False
            job = self._queue[0]
            more, verdict, interrupted = False, None, None
            try:
                self._begin_slice(job)
                if job.slices is None:
                    job.slices = self._begin(job)
                try:
                    arrived, more = next(job.slices), True
                except StopIteration as over:
                    arrived, verdict = self._groups, over.value
                self._mark(job, arrived)
            except BaseException as error:  # noqa: BLE001 - the tier carries on without this copy
                more = False
                self._fail(job, error)
                interrupted = None if isinstance(error, Exception) else error
            self._enqueued += 1
            self._slice_ends[0].record(self._end)
            self._slice_ends.rotate(-1)
            job.in_slice = not more
            if not more:
                end = self._new_event()
                end.record(self._end)
                with self._book:
                    self._under_way.append((job.ticket, job.compute, end, verdict, job.arrived))
                self._queue.popleft()  # only now: what is in neither is waited for by nobody
            if interrupted is not None:
                raise interrupted
            return True

    def has_room(self, ahead: int) -> bool:
        """Whether fewer than ``ahead`` slices are under way; never waits."""
        return bool(self._slice_ends[-ahead].query())

    def top_up(self, ahead: int, meanwhile: Callable[[], object] | None = None) -> bool:
        """Enqueue slices until ``ahead`` of them are under way; whether there was any.

        Args:
            meanwhile: called after each slice; many of them take the host milliseconds.
        """
        found = False
        while self._queue and self.has_room(ahead) and self.advance():
            found = True
            if meanwhile is not None:
                meanwhile()
        return found

    def hold(self, stream: Any, ticket: int) -> None:
        """Make a stream (the current one if None) wait for every copy up to ``ticket``."""
        if ticket <= self._done:
            return
        with self._lock:
            self.flush(ticket)
            event = self._end_of(ticket)
            if event is not None and stream is not None:
                stream.wait_event(event)
            elif event is not None:
                compute = self._device.current_stream()
                compute.wait_event(event)
                self._passed.record(compute)

    def awaited(self) -> bool:
        """Whether compute that was made to wait for a copy still waits; never waits itself.

        An event says it and not the stream: where a launch waits for room on the device, asking its
        stream did not return (docs/copies.md).
        """
        return not self._passed.query()

    def _end_of(self, ticket: int) -> Any:
        """The event that no copy up to ``ticket`` is later than; None if all are done."""
        event = None
        with self._book:
            for number, _, event, *_ in self._under_way:  # noqa: B007 - the last, or the first so far
                if number >= ticket:
                    break
        return event

    def arrivals(self, ticket: int) -> Sequence[Any]:
        """Enqueue a copy, and all before it: events, one for each group of its rows.

        Each is behind these groups and behind every copy before. Fewer if the copy has failed; none
        if it is done, or brings its rows at once.
        """
        with self._lock:
            self.flush(ticket)
            with self._book:
                for number, _, _, _, arrived in self._under_way:
                    if number == ticket:
                        return arrived
        return ()

    def flush(self, ticket: int) -> None:
        """Enqueue every copy up to ``ticket``."""
        with self._lock:
            while self._queue and self._queue[0].ticket <= ticket:
                self.advance()

    def poll(self) -> int:
        """The last ticket done; never waits."""
        if self._under_way:
            with self._book:
                while self._under_way and self._under_way[0][2].query():
                    self._retire()
        return self._done

    def oldest(self) -> Oldest | None:
        """The oldest copy that is not done; never waits, but for another poll."""
        with self._book:
            while self._under_way and self._under_way[0][2].query():
                self._retire()
            if self._under_way:
                ticket, compute, *_ = self._under_way[0]
                return Oldest(ticket, self._enqueued, bool(compute.query()))
        try:
            job = self._queue[0]
        except IndexError:
            return None
        return Oldest(job.ticket, self._enqueued, bool(job.compute.query()))

    def expire(self, ticket: int, reason: str) -> bool:
        """Let the oldest copy fail if none of it is enqueued; whether it has.

        It does not wait for a slice that is being enqueued.
        """

        def fail(streams: object) -> Slices:
            raise CopyLate(reason)

        if not self._lock.acquire(blocking=False):
            return False
        try:
            job = self._queue[0] if self._queue and not self._under_way else None
            if job is None or job.ticket != ticket or job.slices is not None:
                return False
            job.start, job.behind = fail, ()
            return self.advance()
        finally:
            self._lock.release()

    def drain(self, check: Callable[[], object] = int) -> None:
        """Wait, on the host, for every copy submitted.

        Args:
            check: called while a copy is not done; what it raises ends the wait.
        """
        with self._lock:
            while self.advance():
                pass
        self.poll()
        while self._under_way:
            check()
            time.sleep(POLL_S)
            self.poll()

    def abandon(self) -> Any:
        """Forget what is queued; an event for when the device has done all that was enqueued."""
        with self._lock:
            self._queue.clear()
            self._join()
            end = self._new_event()
            end.record(self._end)
            return end

    def _begin_slice(self, job: _Job) -> None:
        """A slice begins. One before it may have been left anywhere, as by a key.

        Its generator has ended then, and would say that all is enqueued and nothing is compared.
        """
        if job.in_slice:
            job.compute = self._new_event()  # its own may be under way already
            raise TransferError("it was interrupted while it was enqueued")
        job.in_slice = True

    def _begin(self, job: _Job) -> Slices:
        self.streams.blocks.wait_event(job.compute)
        for other, ticket in job.behind:
            other.hold(self.streams.bus, ticket)
            # What packs a store notes its checksums, which a load of the same slots compares.
            other.hold(self.streams.blocks, ticket)
        return job.start(self.streams)

    def _mark(self, job: _Job, arrived: int) -> None:
        """So many groups of rows are enqueued."""
        while len(job.arrived) < arrived:
            # A new one: a forward pass may wait for it when the copy is long done.
            event = self._device.new_event()
            event.record(self._end)
            job.arrived.append(event)

    def _fail(self, job: _Job, error: BaseException) -> None:
        self.failed[job.ticket] = failed_by(error)
        job.lost()
        if job.slices is not None:
            # It may be at a slice. What it enqueues as it ends is a part of this copy and comes
            # before the next, so that is not left until the error's traceback is collected.
            with suppress(Exception):  # the copy has failed already
                job.slices.close()
        self._join()

    def _join(self) -> None:
        """What was enqueued so far, on either stream, comes before the next end."""
        for stream in (self.streams.blocks, self.streams.bus):
            self._joined.record(stream)
            self._end.wait_event(self._joined)

    def _new_event(self) -> Any:
        try:
            return self._spare.pop()  # one thread submits while another one enqueues
        except IndexError:
            return self._device.new_event()

    def _retire(self) -> None:
        ticket, compute, end, verdict, _ = self._under_way[0]
        reason = verdict() if verdict is not None else None
        if reason is not None:
            self.failed[ticket] = CopyFailed(MISMATCH, reason)
        self._done = ticket  # only now: who sees that it is done sees that it has failed
        self._under_way.popleft()  # and this after all, or an interrupt would lose what it says
        self._spare += (compute, end)


class SyncCopyQueue:
    """The same for the CPU device, where a copy is done when `submit` returns."""

    queued = under_way = False

    def __init__(self) -> None:
        self.failed: dict[int, CopyFailed] = {}
        self._done = 0

    def submit(self, ticket: int, start: Start, behind: object, lost: Lost = int) -> None:
        """Make a copy."""
        try:
            verdict = finish(start(None))
            reason = verdict() if verdict is not None else None
            if reason is not None:
                self.failed[ticket] = CopyFailed(MISMATCH, reason)
        except BaseException as error:
            self.failed[ticket] = failed_by(error)
            lost()
            if not isinstance(error, Exception):
                raise
        finally:
            self._done = ticket

    def advance(self) -> bool:
        """Nothing is ever queued."""
        return False

    def has_room(self, ahead: int) -> bool:
        """Nothing is ever under way."""
        return True

    def top_up(self, ahead: int, meanwhile: object = None) -> bool:
        """Nothing is ever queued."""
        return False

    def hold(self, stream: object, ticket: int) -> None:
        """Nothing is ever under way."""

    def arrivals(self, ticket: int) -> Sequence[Any]:
        """Nothing is ever under way."""
        return ()

    def poll(self) -> int:
        """The last ticket done."""
        return self._done

    def drain(self, check: object = None) -> None:
        """Nothing is ever under way."""
