"""`CopyEngine`: each plan once, in the order of its tickets, with the waits that it asks for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvoffload_patch.links import (
    CPU,
    GPU,
    LOAD,
    NOT_STORED,
    RAISED,
    STORE,
    Failure,
    Tickets,
)
from kvoffload_patch.plan import Transfer, TransferPlan, TransferResult
from kvoffload_patch.transfer import engine as copy_engine
from kvoffload_patch.transfer.engine import CopyEngine
from kvoffload_patch.transfer.errors import CopyFailed, TransferError
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.queue import SyncCopyQueue

Ids = Sequence[int]


@dataclass
class Batch:
    ticket: int
    gpu_block_ids: Sequence[int] = (1,)
    cpu_slots: Sequence[int] = (2,)


def step_plan(
    loads: Sequence[Batch] = (), store: Batch | None = None, wait_load: int = 0,
    wait_store: int = 0, stores_done: int = 0, loads_done: int = 0, promised: Tickets = (),
) -> TransferPlan:  # fmt: skip
    before = [Transfer(b.ticket, CPU, GPU, b.cpu_slots, b.gpu_block_ids) for b in loads]
    after = [Transfer(b.ticket, GPU, CPU, b.gpu_block_ids, b.cpu_slots) for b in [store] if b]
    waits = (LOAD, wait_load), (STORE, wait_store)
    done = (LOAD, loads_done), (STORE, stores_done)
    return TransferPlan(tuple(before), tuple(after), waits, done, promised)


def progress(
    loads_done: int, stores_done: int, failed_loads: Ids = (), failed_stores: Ids = (),
    why: str = RAISED,
) -> TransferResult:  # fmt: skip
    failed = [Failure(LOAD, t, why) for t in failed_loads]
    failed += [Failure(STORE, t, RAISED) for t in failed_stores]
    return TransferResult(((LOAD, loads_done), (STORE, stores_done)), tuple(failed))


class Recorder:
    """A backend, and two queues, that write down what they are asked."""

    name = "recorder"
    groups = ()

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fails = False

    def load(
        self, gpu_block_ids: Ids, cpu_slots: Ids, streams: Any = None, _: bool = False
    ) -> Iterator[int]:
        return self._copy("load", gpu_block_ids, cpu_slots)

    def store(self, gpu_block_ids: Ids, cpu_slots: Ids, streams: Any = None) -> Iterator[int]:
        return self._copy("store", gpu_block_ids, cpu_slots)

    def _copy(self, name: str, gpu_block_ids: Ids, cpu_slots: Ids) -> Iterator[int]:
        self.calls.append((name, tuple(gpu_block_ids), tuple(cpu_slots)))
        yield 0
        if self.fails:
            raise OSError("the bus\nis on fire")

    def take(self) -> list[Any]:
        calls, self.calls = self.calls, []
        return calls


class RecordingQueue(SyncCopyQueue):
    def __init__(self, name: str, calls: Recorder) -> None:
        super().__init__()
        self.name = name
        self.slices = 0
        self._recorder = calls

    def _note(self, *what: Any) -> None:
        self._recorder.calls.append((self.name, *what))

    def hold(self, stream: object, ticket: int) -> None:
        self._note("hold", stream or "compute", ticket)

    def flush(self, ticket: int) -> None:
        self._note("flush", ticket)

    def top_up(self, ahead: int, meanwhile: Callable[[], object] | None = None) -> bool:
        self._note("top up", ahead)
        for _ in range(self.slices):
            self._note("slice")
            assert meanwhile is not None
            meanwhile()
        return False

    def submit(self, ticket: int, start: Any, behind: Any, lost: Any = int) -> None:
        ((queue, other),) = behind
        self._note("submit", ticket, "behind", queue.name, other)
        super().submit(ticket, start, behind, lost)

    def drain(self, check: object = None) -> None:
        self._note("drain")


def layout() -> BlockLayout:
    return BlockLayout([torch.zeros(4, 3)], 4)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def engine(recorder: Recorder) -> CopyEngine:
    return CopyEngine(layout(), recorder)


@pytest.fixture
def recording(engine: CopyEngine, recorder: Recorder) -> CopyEngine:
    """The same over queues that write down what they are asked."""
    engine._links[LOAD].queue = RecordingQueue("loads", recorder)
    engine._links[STORE].queue = RecordingQueue("stores", recorder)
    return engine


def test_loads_are_submitted_before_the_forward_pass_and_the_store_after_it(
    engine: CopyEngine, recorder: Recorder
) -> None:
    plan = step_plan(
        loads=[Batch(1, (3, 1), (0, 5)), Batch(2, (2,), (7,))], store=Batch(1, (0, 3), (8, 9))
    )
    engine.begin_step(plan)
    assert recorder.take() == [("load", (3, 1), (0, 5)), ("load", (2,), (7,))]
    assert engine.poll() == progress(2, 0)
    engine.end_step()
    assert recorder.take() == [("store", (0, 3), (8, 9))]
    assert engine.poll() == progress(2, 1)


def test_ending_a_step_twice_stores_once(engine: CopyEngine, recorder: Recorder) -> None:
    engine.begin_step(step_plan(store=Batch(1)))
    engine.end_step()
    engine.end_step()
    engine.drain()
    assert len(recorder.calls) == 1
    assert engine.poll() == progress(0, 1)


@pytest.mark.parametrize("following", [None, step_plan(loads=[Batch(1, (3,), (3,))])])
def test_a_store_left_over_goes_first_in_the_next_step(
    engine: CopyEngine, recorder: Recorder, following: TransferPlan | None
) -> None:
    engine.begin_step(step_plan(store=Batch(1)))
    assert recorder.calls == []
    engine.begin_step(following)
    assert recorder.calls[0] == ("store", (1,), (2,))
    engine.end_step()
    assert [call[0] for call in recorder.calls].count("store") == 1


def test_steps_without_a_plan_do_nothing(engine: CopyEngine, recorder: Recorder) -> None:
    for _ in range(3):
        engine.begin_step(None)
        engine.end_step()
    engine.drain()
    assert recorder.calls == []
    assert engine.poll() == progress(0, 0)


def test_draining_submits_the_store_that_is_left(engine: CopyEngine, recorder: Recorder) -> None:
    engine.begin_step(step_plan(store=Batch(1)))
    engine.drain()
    assert recorder.take() == [("store", (1,), (2,))]
    assert engine.poll() == progress(0, 1)


@pytest.mark.parametrize("found", [0, 1, 3, 7])
def test_a_load_out_of_order_is_an_error_and_is_not_submitted(
    engine: CopyEngine, recorder: Recorder, found: int
) -> None:
    engine.begin_step(step_plan(loads=[Batch(1)]))
    recorder.take()
    with pytest.raises(TransferError, match=f"expected ticket 2 from cpu to gpu, found {found}:"):
        engine.begin_step(step_plan(loads=[Batch(found)]))
    assert recorder.calls == []
    assert engine.poll() == progress(1, 0)


@pytest.mark.parametrize("found", [0, 1, 3, 7])
def test_a_store_out_of_order_is_an_error_and_is_not_submitted(
    engine: CopyEngine, recorder: Recorder, found: int
) -> None:
    engine.begin_step(step_plan(store=Batch(1)))
    engine.begin_step(step_plan(store=Batch(found)))
    recorder.take()
    with pytest.raises(TransferError, match=f"expected ticket 2 from gpu to cpu, found {found}:"):
        engine.end_step()
    assert recorder.calls == []
    assert engine.poll() == progress(0, 1)


def test_the_same_plan_twice_is_an_error(engine: CopyEngine, recorder: Recorder) -> None:
    plan = step_plan(loads=[Batch(1)], store=Batch(1))
    engine.begin_step(plan)
    engine.end_step()
    with pytest.raises(TransferError, match="a plan was lost or came twice"):
        engine.begin_step(plan)
    assert [call[0] for call in recorder.calls] == ["load", "store"]


def test_every_wait_of_a_plan_is_where_it_belongs(
    recording: CopyEngine, recorder: Recorder
) -> None:
    plan = step_plan([Batch(1), Batch(2)], Batch(1), 6, 5, 4, 3)
    recording.begin_step(plan)
    assert recorder.take() == [
        # The forward pass, and with it the loads, wait for stores of blocks handed out.
        ("stores", "hold", "compute", 5),
        ("loads", "submit", 1, "behind", "stores", 4),
        ("load", (1,), (2,)),
        ("loads", "submit", 2, "behind", "stores", 4),
        ("load", (1,), (2,)),
        ("loads", "hold", "compute", 6),
    ]
    recording.end_step()
    assert recorder.take() == [
        ("stores", "submit", 1, "behind", "loads", 3),
        ("store", (1,), (2,)),
        # The device has work to do now, and the next step takes its time to begin.
        ("stores", "top up", copy_engine.STEP_STORE_SLICES),
        ("loads", "top up", copy_engine.STEP_LOAD_SLICES),
    ]


def test_what_a_step_leaves_queued_wakes_the_thread(
    recording: CopyEngine, recorder: Recorder
) -> None:
    class Queued(RecordingQueue):
        queued = True

    wake = SimpleNamespace(wake=lambda: recorder.calls.append(("wake",)))
    recording._thread = cast("Any", wake)
    recording.end_step()
    assert ("wake",) not in recorder.take()
    for link, name in ((STORE, "stores"), (LOAD, "loads")):
        own = recording._links[link].queue
        recording._links[link].queue = Queued(name, recorder)
        recording.end_step()
        assert recorder.take() == [
            ("stores", "top up", copy_engine.STEP_STORE_SLICES),
            ("loads", "top up", copy_engine.STEP_LOAD_SLICES),
            ("wake",),
        ]
        recording._links[link].queue = own


def test_stores_do_not_run_dry_while_a_long_load_is_enqueued(
    recording: CopyEngine, recorder: Recorder
) -> None:
    recording._links[LOAD].queue.slices = 2  # type: ignore[union-attr]
    stores = ("stores", "top up", copy_engine.STEP_STORE_SLICES)
    recording.end_step()
    slices = [("loads", "slice"), stores] * 2
    assert recorder.take() == [stores, ("loads", "top up", copy_engine.STEP_LOAD_SLICES), *slices]


def test_a_step_tops_up_loads_before_it_if_the_bus_would_be_idle(
    recording: CopyEngine, recorder: Recorder
) -> None:
    asked: list[int] = []

    class Queued(RecordingQueue):
        queued = True

        def has_room(self, ahead: int) -> bool:
            asked.append(ahead)
            return has_room

    recording._links[LOAD].queue = Queued("loads", recorder)
    recording._thread = cast("Any", SimpleNamespace(wake=lambda: recorder.calls.append("wake")))
    for has_room in (False, True):
        recording.begin_step(step_plan(wait_load=1))
        wanted = [("stores", "hold", "compute", 0), ("loads", "hold", "compute", 1)]
        # What this step waits for goes first, and the copy thread does the rest.
        wanted += [("loads", "top up", copy_engine.THREAD_LOAD_SLICES)] if has_room else []
        assert recorder.take() == [*wanted, "wake"]
    assert asked == [1, 1]
    recording.begin_step(None)
    assert recorder.take() == ["wake"]


def test_a_plan_without_transfers_only_waits(recording: CopyEngine, recorder: Recorder) -> None:
    recording.begin_step(step_plan(wait_load=2, wait_store=1, stores_done=1, loads_done=1))
    recording.end_step()
    assert recorder.calls == [
        ("stores", "hold", "compute", 1),
        ("loads", "hold", "compute", 2),
        ("stores", "top up", copy_engine.STEP_STORE_SLICES),
        ("loads", "top up", copy_engine.STEP_LOAD_SLICES),
    ]


def test_draining_waits_for_both_directions(recording: CopyEngine, recorder: Recorder) -> None:
    recording.begin_step(step_plan(store=Batch(1)))
    recorder.take()
    recording.drain()
    calls = recorder.take()
    assert ("store", (1,), (2,)) in calls
    assert sorted(calls[-2:]) == [("loads", "drain"), ("stores", "drain")]


@pytest.mark.parametrize("error", [None, RuntimeError("the device is gone")])
def test_closing_drains_and_then_ends_the_copy_thread_in_any_case(
    recording: CopyEngine, recorder: Recorder, error: Exception | None
) -> None:
    def drain(check: object) -> None:
        recorder.calls.append("drain")
        if error is not None:
            raise error

    queue: Any = recording._links[STORE].queue
    queue.drain = drain
    recording._thread = cast("Any", SimpleNamespace(close=lambda: recorder.calls.append("close")))
    with pytest.raises(RuntimeError, match="is gone") if error else nullcontext():
        recording.close()
    assert recorder.take() == [("loads", "drain"), "drain", "close"]


def test_a_device_of_a_kind_that_nothing_copies_on_is_refused(recorder: Recorder) -> None:
    other = cast("BlockLayout", SimpleNamespace(device=torch.device("meta"), block_bytes=1))
    with pytest.raises(TransferError, match="on one of cpu, cuda, npu, xpu, found meta"):
        CopyEngine(other, recorder)


# Failures


def test_a_failed_copy_is_done_and_named_until_a_plan_shows_that_it_is_known(
    engine: CopyEngine, recorder: Recorder
) -> None:
    recorder.fails = True
    engine.begin_step(step_plan(loads=[Batch(1)], store=Batch(1)))
    engine.end_step()
    recorder.fails = False
    for _ in range(2):
        assert engine.poll() == progress(1, 1, (1,), (1,))
    assert engine.failed(((LOAD, 2), (LOAD, 1))) == (LOAD, 1, "the bus is on fire")
    engine.begin_step(step_plan(loads=[Batch(2, cpu_slots=(5,))], loads_done=0, stores_done=0))
    assert engine.poll() == progress(2, 1, (1,), (1,))
    engine.begin_step(step_plan(loads_done=1, stores_done=0))
    assert engine.poll() == progress(2, 1, (), (1,))
    engine.begin_step(step_plan(loads_done=2, stores_done=1))
    assert engine.poll() == progress(2, 1)
    assert engine.failed(((LOAD, 1),)) is None


def test_a_failure_is_told_even_if_another_rank_has_said_that_the_copy_is_done(
    engine: CopyEngine, recorder: Recorder
) -> None:
    """The scheduler hears from one rank only, and does not know of the failures of this one."""
    recorder.fails = True
    engine.begin_step(step_plan(loads=[Batch(1)], store=Batch(1)))
    engine.begin_step(step_plan(loads_done=1, stores_done=1))
    assert engine.poll() == progress(1, 1, (1,), (1,))
    engine.begin_step(step_plan(loads_done=1, stores_done=1))
    assert engine.poll() == progress(1, 1)


def test_a_load_fails_where_the_store_of_one_of_its_slots_has(
    engine: CopyEngine, recorder: Recorder
) -> None:
    recorder.fails = True
    engine.begin_step(step_plan(store=Batch(1, (1, 2), (5, 6))))
    engine.end_step()
    recorder.fails = False
    recorder.take()
    # The scheduler may have heard from another rank only.
    engine.begin_step(step_plan([Batch(1, (3, 4), (4, 6)), Batch(2, (3,), (4,))], stores_done=1))
    assert recorder.take() == [("load", (3,), (4,))]
    assert engine.poll() == progress(2, 1, (1,), (1,), NOT_STORED)
    assert engine.failed(((LOAD, 1),)) == (
        LOAD,
        1,
        "an earlier copy of some of these blocks to the cpu has failed on this rank.",
    )
    engine.begin_step(step_plan(store=Batch(2, (1,), (6,)), loads_done=2))
    engine.begin_step(step_plan([Batch(3, (1,), (6,)), Batch(4, (1,), (5,))], stores_done=2))
    assert engine.poll() == progress(4, 2, (4,), (), NOT_STORED), (
        "only what was stored again is good again"
    )


def test_a_load_that_the_step_waits_for_is_known_to_have_failed_when_the_step_begins(
    recording: CopyEngine, recorder: Recorder
) -> None:
    recording.begin_step(step_plan([Batch(1)], wait_load=1))
    recorder.fails = True
    recording.begin_step(step_plan([Batch(2), Batch(3)], wait_load=2))
    queue: Any = recording._links[LOAD].queue
    queue._done = 0
    assert recording.failed(((LOAD, 1),)) is None
    assert recording.failed(((LOAD, 1), (LOAD, 2))) == (LOAD, 2, "the bus is on fire")
    assert recording.poll() == progress(0, 0), "what is not over is not told as failed"
    queue._done = 3
    assert recording.poll() == progress(3, 0, (2, 3))


def test_slots_are_waited_for_before_they_are_used(recorder: Recorder) -> None:
    asked: list[int] = []

    def wait_ready(num_slots: int) -> None:
        asked.append(num_slots)
        if num_slots > 8:
            raise TransferError("there will be no more")

    engine = CopyEngine(layout(), recorder, wait_ready)
    engine.begin_step(step_plan(store=Batch(1, (1, 2), (7, 3))))
    engine.begin_step(step_plan(store=Batch(2, (1, 2), (3, 8))))
    engine.end_step()
    assert asked == [8, 9]
    assert recorder.take() == [("store", (1, 2), (7, 3))]
    assert engine.poll() == progress(0, 2, (), (2,))
    assert engine.failed(((STORE, 2),)) == (STORE, 2, "there will be no more")


def test_failures_can_be_read_while_another_thread_adds_to_them(engine: CopyEngine) -> None:
    failed = engine._links[STORE].queue.failed
    over = threading.Event()

    def add() -> None:
        for ticket in range(20_000):
            failed[ticket] = CopyFailed(RAISED, "")
        over.set()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=add)
    thread.start()
    try:
        while not over.is_set():
            engine.poll()
            engine.begin_step(step_plan(stores_done=1))
    finally:
        sys.setswitchinterval(before)
        thread.join()


@pytest.mark.parametrize("plan", [None, step_plan()])
def test_a_copy_thread_that_has_ended_is_said_in_the_next_step(
    engine: CopyEngine, plan: TransferPlan | None
) -> None:
    """Or a request would wait for its load for ever."""

    class Ended:
        def wake(self) -> None:
            raise TransferError("the copy thread has ended")

    engine._thread = cast("Any", Ended())
    engine.begin_step(plan)  # nothing is queued
    queued = SyncCopyQueue()
    queued.queued = True
    engine._links[LOAD].queue = queued
    with pytest.raises(TransferError, match="has ended"):
        engine.begin_step(plan)
