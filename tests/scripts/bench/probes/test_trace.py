"""`bench trace` on made-up events, of which periods, phases, intervals and bound are known."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.bench.probes import observers, trace_report
from scripts.bench.probes.observers import observe
from scripts.bench.probes.recorder import EVENTS, DeviceClock, HostClock, Recorder
from scripts.bench.probes.trace import document_of
from scripts.bench.probes.trace_events import _Reader, read
from scripts.bench.probes.trace_figures import (
    FLOOR,
    ON,
    Figures,
    change,
    first_come_first_served,
    quantiles,
)

BLOCK, HISTORY = 16, 165  # 10 whole blocks
ABOUT = {"block_tokens": BLOCK, "block_bytes": 2_000_000}
LOADED, ALONE = 0.030, 0.010  # seconds from arrival to the first token


class Engine:
    """Makes the events of an engine whose times are known."""

    def __init__(self) -> None:
        self.events: list[list[Any]] = [[0.0, "about", ABOUT]]
        self.number = self.step = self.ticket = 0

    def ask(self, at: float, first: float, loads: bool, found: int = 160) -> None:
        """A request: 1 ms to the scheduler, 2 to its load, 4 to the bus, 10 of bus, 1 to a step."""
        self.number += 1
        number = self.number
        self.events += [[at, "arrive", number], [at + 0.001, "add", number, HISTORY]]
        if loads:
            self.ticket += 1
            self.events.append([at + 0.003, "load", self.ticket, number, 10])
            self.events.append([at + 0.007, "bus", True, self.ticket, at + 0.017, 20_000_000])
        joined = at + 0.018 if loads else at + 0.002
        self.play(joined, at + first, [[number, found]], tokens=6)
        for token in range(1, 8):
            before = at + first + 0.008 * (token - 1)
            self.play(before, before + 0.008, [], tokens=1)

    def play(self, at: float, over: float, new: list[list[int]], tokens: int) -> None:
        self.step += 1
        self.events.append([at, "schedule", self.step, at, 1, tokens, new])
        self.events.append([over, "returned", self.step, [self.number]])
        self.events.append([at, "device", self.step, 0.5, 1000 * (over - at) - 0.5])
        self.events.append([at, "host", self.step, "launches", 2.0 + (tokens > 1)])

    def period(self, at: float, cycle: int, variant: str) -> None:
        self.events.append([at, "period", cycle, variant])

    def lines(self) -> list[str]:
        return [json.dumps(event) for event in self.events]


def engine(slower: float = 0.005) -> Engine:
    """Three cycles; without the mechanism a first token takes ``slower`` longer."""
    made, at = Engine(), 1.0
    variants = ((ON, LOADED, True), ("pieces", LOADED + slower, True), (FLOOR, ALONE, False))
    for cycle in (1, 2, 3):
        for variant, first, loads in variants:
            made.period(at, cycle, variant)
            for asked in range(8):
                made.ask(at + 0.3 + 0.1 * asked, first + 0.0001 * asked, loads)
            at += 1.5
        made.period(at, cycle, "")
    return made


def figures(made: Engine) -> Figures:
    return Figures(read(made.lines()), drop_s=0.2, guard_s=0.1)


def test_phases_add_up_to_the_time_of_a_first_token() -> None:
    found = figures(engine()).document(resamples=50)
    on = found["variants"][ON]
    assert (on["requests"], on["left_out"], found["cycles"]) == (24, 0, 3)
    medians = {name: values["p50"] for name, values in on["metrics"].items()}
    phases = [1.0, 2.0, 4.0, 10.0, 1.0]
    assert list(medians.values())[1:6] == pytest.approx(phases)
    assert medians["in its step"] == pytest.approx(medians["first token"] - sum(phases))
    assert medians["a token"] == pytest.approx(8.0)
    assert on["metrics"]["longest step"]["largest"] == pytest.approx(12.7)


def test_what_is_switched_off_is_clear_and_what_changes_nothing_is_not() -> None:
    slower = figures(engine()).document(200)["changes"]["pieces"]["first token"]["p50"]
    assert slower["change"] == pytest.approx(5.0)
    assert slower["interval"][0] > 4
    same = figures(engine(slower=0.0)).document(200)["changes"]["pieces"]["first token"]["p50"]
    assert same["interval"][0] <= 0 <= same["interval"][1]


def test_an_interval_is_as_wide_as_cycles_differ() -> None:
    on = {cycle: [10.0] * 5 for cycle in range(8)}
    off = {cycle: [10.0 + (cycle % 2) * 4] * 5 for cycle in range(8)}
    found = change(off, on, 300)["p99"]
    assert found["change"] == 4 and found["interval"] == [4.0, 4.0]
    found = change(off, on, 300)["p50"]
    assert found["interval"] == [0.0, 4.0]
    assert change({1: [2.0]}, {1: [1.0]}, 300)["p50"] == {"change": 1.0, "interval": None}


def test_the_bound_is_the_floor_and_the_bus() -> None:
    bound = figures(engine()).document(10)["bound"]
    assert bound["ms_per_block"] == pytest.approx(1.0)
    assert bound["gb_per_s"] == pytest.approx(2.0)
    rows = {name: row["p50"] for name, row in bound["rows"].items()}
    assert rows["bus"] == pytest.approx(10) and rows["queueing for the bus"] == 0
    assert rows["floor, bus and queueing"] == pytest.approx(rows["floor"] + 10)
    assert rows["measured"] == pytest.approx(30.3) and rows["floor"] == pytest.approx(10.3)


def test_loads_that_come_together_queue_for_the_bus() -> None:
    assert first_come_first_served([(0, 10), (2, 10), (30, 5), (31, 1)]) == [0, 8, 0, 4]


def test_requests_that_computed_again_are_left_out() -> None:
    made = engine()
    made.period(20.0, 4, ON)
    made.ask(20.5, LOADED, True, found=144)
    for variant in ("pieces", FLOOR):
        made.period(21.5, 4, variant)
    made.period(23.0, 4, "")
    found = figures(made)
    assert found.left_out == {ON: 1} and len(found.counted[ON]) == 24


def test_a_cycle_that_was_cut_off_does_not_count() -> None:
    made = engine()
    made.period(20.0, 4, ON)
    made.ask(20.5, LOADED, True)
    lines = [*made.lines(), '[21.0,"arri']
    found = Figures(read(lines), 0.2, 0.1)
    assert sorted(found.samples[ON]) == [1, 2, 3]


def test_steps_are_told_apart_by_what_they_compute_and_what_crosses() -> None:
    found = figures(engine()).document(10)["steps"]
    assert {kind: row["steps"] for kind, row in found[FLOOR].items()} == {
        "decodes": 168,
        "joins": 24,
    }
    assert found[FLOOR]["joins"]["held"]["p50"] == 0.5
    host = {kind: row["host"]["launches"]["p50"] for kind, row in found[FLOOR].items()}
    assert host == {"decodes": 2.0, "joins": 3.0}
    trace = read(engine().lines())
    assert not any(step.beside for step in trace.steps), "each waits for its own load"
    made = Engine()
    made.play(1.005, 1.012, [], tokens=1)
    made.ask(1.0, LOADED, True)
    assert [step.kind for step in read(made.lines()).steps if step.beside] == [
        "decodes, beside a load"
    ]


def test_quantiles_are_samples() -> None:
    assert quantiles([3.0, 1.0, 2.0, 4.0]) == {"p50": 2.0, "p90": 4.0, "p99": 4.0, "largest": 4.0}


def test_a_file_makes_the_tables(tmp_path: Path) -> None:
    made = engine()
    made.events[0][2] = {**ABOUT, "machine": {}, "options": {"drop": 0.2, "guard": 0.1}}
    file = tmp_path / "events.jsonl"
    file.write_text("\n".join(made.lines()))
    document = document_of(file)
    page = trace_report.page(document)
    assert "| without pieces |" in page.replace("  ", "") and "**+5.00 (" in page
    assert "3.00 / 3.00" in page.partition("engine's thread")[2]
    bound = trace_report.bound(document)
    assert "1.0000 ms (2.0 GB/s)" in bound and "| 2.94 |" in bound


class Watched:
    def answer(self, value: int) -> int:
        return value + 1


def test_an_observer_that_raises_does_not_stop_what_it_observes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(watched: Watched, value: int) -> None:
        raise ValueError("observed")

    class Own(Watched):
        answer = Watched.answer

    seen: list[int] = []
    observe(Own, "answer", fails, lambda result, watched, value: seen.append(result))
    assert [Own().answer(value) for value in range(9)] == seen == list(range(1, 10))
    told = capsys.readouterr()
    assert told.out.count("the observer of Own.answer failed") == 3
    assert told.err.count("ValueError: observed") == 3


def test_an_observer_takes_what_a_method_takes() -> None:
    class Own(Watched):
        answer = Watched.answer

    with pytest.raises(TypeError, match="too many positional arguments"):
        observe(Own, "answer", before=lambda watched: None)
    with pytest.raises(TypeError, match="too many positional arguments"):
        observe(Own, "answer", after=lambda watched, value: None)


def test_what_is_observed_of_our_classes_is_there_and_takes_what_it_took(tmp_path: Path) -> None:
    from kvoffload_patch.integration.engine.requests.loads import LoadBook
    from kvoffload_patch.integration.engine.tier import SchedulerTier
    from kvoffload_patch.integration.worker.tier import RankTier
    from kvoffload_patch.transfer.engine import CopyEngine
    from kvoffload_patch.transfer.link import LinkCopies
    from kvoffload_patch.transfer.queue import CopyQueue, SyncCopyQueue

    classes = SchedulerTier, LoadBook, RankTier, CopyEngine, LinkCopies, CopyQueue, SyncCopyQueue
    tier, book, *others = (type(kind.__name__, (kind,), dict(vars(kind))) for kind in classes)
    recorder = Recorder(tmp_path / "events.jsonl", HostClock())
    observers.observe_loads(recorder, book)
    observers.observe_worker(recorder, *others[:2])
    observers.observe_copies(recorder, *others[2:])
    observers.observe_host(recorder, tier, others[0])
    recorder.close()


def test_each_kind_of_event_is_said_and_read() -> None:
    assert {f"on_{kind}" for kind in EVENTS} == {n for n in vars(_Reader) if n.startswith("on_")}


def test_events_are_written_by_a_thread_and_marks_as_seconds(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    recorder = Recorder(file, HostClock())
    recorder.note("arrive", 7)
    recorder.note("bad", threading.Lock())  # cannot be written, and is left out
    recorder.note("bus", 1.0, 2.5, True, 3, 4096)
    recorder.note("device", 5, 1.0, 1.002, 1.01)
    recorder.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    if len(lines) < 3:  # the failure has ended the last writing
        pytest.fail(f"lost behind an event that cannot be written: {lines}")
    assert lines[0][1:] == ["arrive", 7]
    assert lines[1:] == [[1.0, "bus", True, 3, 2.5, 4096], [1.0, "device", 5, 2.0, 8.0]]


class FakeEvent:
    """Done once synchronised or told so; its device's clock began 500 s after the host's."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms, self.over = 0.0, False

    def record(self, stream: object = None) -> None:
        self.at_ms = 1000 * (time.perf_counter() - 500)

    def synchronize(self) -> None:
        self.over = True

    def query(self) -> bool:
        return self.over

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.at_ms - self.at_ms


def test_marks_of_a_device_are_told_on_the_clock_of_the_host() -> None:
    cuda = SimpleNamespace(
        Event=FakeEvent, Stream=object, current_device=lambda: 0, set_device=lambda device: None
    )
    clock = DeviceClock(SimpleNamespace(cuda=cuda))
    clock.anchor()
    before = time.perf_counter()
    mark = clock.mark()
    after = time.perf_counter()
    assert clock.seconds(mark) is None, "the device has not come there"
    mark.synchronize()
    assert before - 0.001 < clock.seconds(mark) < after + 0.001
