"""What the observers wrote down, as requests, steps, copies and periods."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# Phases of a request that waits for a load, each from a moment to the next one.
PHASES = {
    "to the scheduler": ("arrived", "added"),
    "to its load": ("added", "begun"),
    "to the bus": ("begun", "bus_began"),
    "on the bus": ("bus_began", "bus_over"),
    "to its step": ("bus_over", "joined"),
    "in its step": ("joined", "first"),
}


@dataclass
class Request:
    """Moments of a request, in seconds; None if it never came to that.

    Attributes:
        arrived: it reached the engine's process.
        added: the scheduler had it.
        begun: its load was decided on.
        bus_began, bus_over: the bus was its load's, and no more.
        joined: the first step with it was scheduled.
        tokens: when the step of each came back.
        blocks: that were loaded.
        history: tokens of its prompt that were asked before.
        found: tokens of its prompt that it did not compute.
    """

    number: int
    arrived: float | None = None
    added: float | None = None
    begun: float | None = None
    bus_began: float | None = None
    bus_over: float | None = None
    joined: float | None = None
    tokens: list[float] = field(default_factory=list)
    blocks: int = 0
    history: int = 0
    found: int = 0

    @property
    def first(self) -> float | None:
        """When its first token came."""
        return self.tokens[0] if self.tokens else None

    def waits_ms(self) -> float:
        """From arrival to the first token."""
        assert self.arrived is not None
        return 1000 * (self.tokens[0] - self.arrived)

    def phases(self) -> dict[str, float]:
        """Milliseconds of each; below 0 where it joined before its load was over."""
        moments = [(name, getattr(self, a), getattr(self, b)) for name, (a, b) in PHASES.items()]
        return {name: 1000 * (b - a) for name, a, b in moments if a is not None and b is not None}


@dataclass
class Step:
    """A step of the engine; times in seconds.

    Attributes:
        began: it was to be scheduled, or the one before came back, whichever was later.
        over: it came back.
        joins: whether it computes more than a token for each request, or new ones.
        beside: whether a load crossed the bus meanwhile.
        held_ms, ran_ms: on the device, waiting for copies and computing; None if not measured.
        host_ms: what the engine's thread did for it, by part.
        scheduled: when its `schedule` had returned.
        new: requests that are in a step for the first time.
    """

    began: float
    over: float
    joins: bool
    beside: bool = False
    held_ms: float | None = None
    ran_ms: float | None = None
    host_ms: dict[str, float] = field(default_factory=dict)
    scheduled: float = 0.0
    new: list[int] = field(default_factory=list)

    @property
    def took_ms(self) -> float:
        """From the one before to this one."""
        return 1000 * (self.over - self.began)

    @property
    def kind(self) -> str:
        """In words."""
        return ("joins" if self.joins else "decodes") + (", beside a load" if self.beside else "")


@dataclass
class Period:
    """A stretch of time in which one variant was played."""

    cycle: int
    variant: str
    began: float
    over: float


@dataclass
class Trace:
    """All of a file.

    Attributes:
        loads: begin, end and blocks of each load on the bus, in order.
    """

    about: dict[str, Any]
    requests: dict[int, Request]
    steps: list[Step]
    periods: list[Period]
    loads: list[tuple[float, float, int]]


class _Reader:
    """Takes the events one by one; a method for each kind."""

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}
        self.requests: dict[int, Request] = {}
        self.marks: list[tuple[float, int, str]] = []
        self.loads: list[tuple[float, float, int]] = []
        self.by_ticket: dict[int, Request] = {}
        self.scheduled: dict[int, tuple[float, float, bool, list[int]]] = {}
        self.returned: dict[int, float] = {}
        self.device: dict[int, tuple[float, float]] = {}
        self.host: dict[int, dict[str, float]] = {}

    def _request(self, number: int) -> Request:
        return self.requests.setdefault(number, Request(number))

    def on_about(self, at: float, about: dict[str, Any]) -> None:
        self.about.update(about)

    def on_period(self, at: float, cycle: int, variant: str) -> None:
        self.marks.append((at, cycle, variant))

    def on_arrive(self, at: float, number: int) -> None:
        self._request(number).arrived = at

    def on_add(self, at: float, number: int, history: int) -> None:
        request = self._request(number)
        request.added, request.history = at, history

    def on_load(self, at: float, ticket: int, number: int | None, blocks: int) -> None:
        if number is not None:
            request = self.by_ticket[ticket] = self._request(number)
            request.begun, request.blocks = at, blocks

    def on_published(self, at: float, ticket: int, done: bool) -> None:
        pass

    def on_schedule(self, at: float, number: int, began: float, requests: int, tokens: int,
                    new: list[tuple[int, int]]) -> None:  # fmt: skip
        joins = bool(new) or tokens > requests
        self.scheduled[number] = at, began, joins, [name for name, _ in new]
        for name, found in new:
            request = self._request(name)
            if request.joined is None:
                request.joined, request.found = at, found

    def on_returned(self, at: float, step: int, numbers: list[int | None]) -> None:
        self.returned[step] = at
        for number in numbers:
            if number is not None:
                self._request(number).tokens.append(at)

    def on_bus(self, at: float, to_gpu: bool, ticket: int, over: float, nbytes: int) -> None:
        request = self.by_ticket.get(ticket)
        if to_gpu and request is not None:
            request.bus_began, request.bus_over = at, over
            self.loads.append((at, over, request.blocks))

    def on_device(self, at: float, step: int, held_ms: float, ran_ms: float) -> None:
        self.device[step] = held_ms, ran_ms

    def on_host(self, at: float, step: int, part: str, took_ms: float) -> None:
        self.host.setdefault(step, {})[part] = took_ms


def read(lines: Iterable[str]) -> Trace:
    """The events of a file, the last line of which may be cut off."""
    reader = _Reader()
    last = 0.0
    for line in lines:
        try:
            at, kind, *fields = json.loads(line)
        except ValueError:
            continue
        getattr(reader, f"on_{kind}")(at, *fields)
        last = max(last, at)
    loads = sorted(reader.loads)
    marks = [*reader.marks, (last, 0, "")]
    periods = [
        Period(cycle, variant, at, after[0])
        for (at, cycle, variant), after in zip(marks, marks[1:])
        if variant
    ]
    return Trace(reader.about, reader.requests, _steps(reader, loads), periods, loads)


def _steps(reader: _Reader, loads: list[tuple[float, float, int]]) -> list[Step]:
    ends = [over for _, over, _ in loads]
    steps = []
    before = 0.0
    for number, over in sorted(reader.returned.items()):
        if number in reader.scheduled:
            at, began, joins, new = reader.scheduled[number]
            step = Step(max(began, before), over, joins, scheduled=at, new=new)
            next_load = bisect_left(ends, step.began)
            step.beside = next_load < len(loads) and loads[next_load][0] < over
            step.held_ms, step.ran_ms = reader.device.get(number, (None, None))
            step.host_ms = reader.host.get(number, {})
            steps.append(step)
        before = over
    return steps
