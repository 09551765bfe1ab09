"""A file of events: taken from any thread, written down by one of its own.

A line is a JSON list: seconds of `time.perf_counter`, a kind, and what `EVENTS` says of it.
`trace_events` reads it. What fails here is printed, and the engine goes on.
"""

from __future__ import annotations

import functools
import json
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvoffload_patch.threads import JoinedThread

EVENTS = {
    "about": "what the engine is, as a dictionary",
    "period": "cycle, variant; until the next of them. An empty variant does not count",
    "arrive": "request; it has reached the engine's process",
    "add": "request, tokens of the history before its message; the scheduler has it",
    "load": "ticket, request, blocks; decided on",
    "published": "ticket, whether it was done",
    "schedule": "step, when it was scheduled, requests, tokens, [[request, tokens found], ...]",
    "returned": "step, requests that got a token",
    "bus": "whether to the GPU, ticket, when it was over, bytes",
    "device": "step, milliseconds that it waited for copies, and that it computed",
    "host": "step, a part of what the engine's thread does for it (`HOST`), its milliseconds",
}
HOST = {
    "lookups": "SchedulerTier.before_schedule: what is done, lookups, loads begun",
    "schedule": "what vLLM's schedule does between that and the plan",
    "plan": "SchedulerTier.after_schedule",
    "copies before": "RankTier.begin_step: loads that the step reads are enqueued",
    "launches": "the forward pass and sampling",
    "copies after": "RankTier.end_step: stores and more of the loads are enqueued",
}
WRITE_S = 0.05
ANCHOR_S = 0.5  # clocks drift apart by microseconds a second
ANCHOR_GOOD_S, ANCHOR_TRIES = 0.0001, 20
Note = Callable[..., None]
TOLD = 3  # failures of an observer that are printed


class HostClock:
    """Marks of an engine on the CPU: a copy is made by its call."""

    def mark(self, stream: object = None) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, mark: float) -> float | None:
        """When it was."""
        return mark

    def anchor(self) -> None:
        """There is one clock."""


class DeviceClock:
    """Marks on a CUDA device's streams, on the clock of the host.

    Args:
        torch: the module.
    """

    def __init__(self, torch: Any) -> None:
        self._new_event = functools.partial(torch.cuda.Event, enable_timing=True)
        self._device = torch.cuda.current_device()
        self._cuda = torch.cuda
        self._stream: Any = None
        self._anchor: tuple[float, Any] = (0.0, None)

    def mark(self, stream: Any = None) -> Any:
        """When the device comes to this place of a stream, or of the current one."""
        event = self._new_event()
        event.record(stream) if stream is not None else event.record()
        return event

    def seconds(self, mark: Any) -> float | None:
        """When it came there; None if it has not."""
        at, anchor = self._anchor
        return at + anchor.elapsed_time(mark) / 1000 if mark.query() else None

    def anchor(self) -> None:
        """Compare the clocks, in the thread that writes down."""
        if time.perf_counter() - self._anchor[0] < ANCHOR_S:
            return
        if self._stream is None:
            self._cuda.set_device(self._device)
            self._stream = self._cuda.Stream()
        best = float("inf")
        for _ in range(ANCHOR_TRIES):
            began, event = time.perf_counter(), self._new_event()
            event.record(self._stream)
            event.synchronize()
            over = time.perf_counter()
            if over - began < best:
                best, self._anchor = over - began, (over, event)
            if best < ANCHOR_GOOD_S:
                return


class Recorder:
    """Takes events from any thread, and writes them down in one of its own.

    Args:
        path: of the file, which lines are added to.
        clock: a mark in an event is written as its seconds.

    Attributes:
        asked: the request whose load is being decided on.
        tier: the scheduler's, once it has been seen.
        step: the last one scheduled.
        marks: of the step that the worker has begun: its number, and when.
        to_gpu: whether a queue of copies brings blocks to the GPU, and the ticket and bytes of
            what it was given.
    """

    def __init__(self, path: Path, clock: Any) -> None:
        self.clock = clock
        self.asked: int | None = None
        self.tier: Any = None
        self.step = 0
        self.marks: list[Any] = []
        self.to_gpu: dict[int, bool] = {}
        self.bytes: dict[tuple[bool, int], int] = {}
        self.block_bytes = 0
        self._path = path
        self._events = deque[tuple[float, str, tuple[Any, ...]]]()
        self._ended = threading.Event()
        self._try = guarded(lambda function: function(), "an event")
        self._thread = JoinedThread(self._run, "trace", self._ended.set)
        self._thread.start()

    def note(self, kind: str, *fields: Any) -> None:
        """An event, now. A field may be a mark."""
        self._events.append((time.perf_counter(), kind, fields))

    def close(self) -> None:
        """Write the rest down."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with self._path.open("a") as file:
            write = guarded(self._write, "the file")
            while not self._ended.wait(WRITE_S):
                write(file)
            write(file)

    def _write(self, file: Any) -> None:
        self.clock.anchor()
        while self._events:
            lines: list[str] = []
            self._try(lambda: lines.append(self._line(*self._events[0])))  # noqa: B023 - at once
            if lines == [""]:
                break
            self._events.popleft()  # one that cannot be written goes
            file.write("".join(f"{line}\n" for line in lines))
        file.flush()

    def _line(self, at: float, kind: str, fields: tuple[Any, ...]) -> str:
        """Empty if a mark of it is not over."""
        values = list(fields)
        if kind == "bus":
            at, over = map(self.clock.seconds, fields[:2])
            if at is None or over is None:
                return ""
            values = [fields[2], fields[3], round(over, 6), fields[4]]
        elif kind == "device":
            marks = [self.clock.seconds(mark) for mark in fields[1:]]
            if None in marks:
                return ""
            held, ran = (round(1000 * (b - a), 3) for a, b in zip(marks, marks[1:]))
            at, values = marks[0], [fields[0], held, ran]
        return json.dumps([round(at, 6), kind, *values], separators=(",", ":"))


def guarded(function: Note | None, where: str) -> Note:
    """The same, but what it raises is printed, the first times, and goes no further."""
    told = 0

    def call(*args: Any, **kwargs: Any) -> None:
        nonlocal told
        try:
            if function is not None:
                function(*args, **kwargs)
        except Exception:  # noqa: BLE001 - the engine goes on
            told += 1
            if told <= TOLD:
                print(f"trace: the observer of {where} failed:", flush=True)
                traceback.print_exc()

    return call
