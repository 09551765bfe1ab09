"""Copies that never end: each is said, and fails or ends the engine; what is only late does not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exits import TIMES, exits
from transfer.fake_cuda import FakeCuda
from transfer.hung_process import HungProcess
from transfer.resident import kvoffload_threads

from kvoffload_patch.links import CPU, GPU, LATE, LOAD, STORE
from kvoffload_patch.plan import Transfer, TransferPlan
from kvoffload_patch.transfer import deadline
from kvoffload_patch.transfer import engine as copy_engine
from kvoffload_patch.transfer import queue as copy_queue
from kvoffload_patch.transfer.backends.base import Slices, Streams
from kvoffload_patch.transfer.deadline import DEADLINE_PERIOD_S, DEADLINE_S, DeadlineWatch, Oldest
from kvoffload_patch.transfer.engine import CopyEngine
from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.queue import CopyQueue
from kvoffload_patch.transfer.tuning import GRACE_S

LOOKS = round(DEADLINE_S / DEADLINE_PERIOD_S)
GRACE = round(GRACE_S / DEADLINE_PERIOD_S)
LOGGER = "vllm.kvoffload_patch"


class Rank:
    """An engine on the streams of a `FakeCuda`, on which nothing goes on by itself."""

    name = "slices"
    groups = ()

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.done: list[str] = []
        self.ended = 0
        layout = BlockLayout([torch.zeros(4, 3)], 4)
        self.engine: Any = CopyEngine(layout, self, end=self._end)
        lock = threading.RLock()
        for link, copies in self.engine._links.items():
            copies.queue = CopyQueue(cuda, lock, link[1] != GPU, slices_ahead=9)
        self.loads, self.stores = (self.engine._links[link].queue for link in (LOAD, STORE))
        self.watch = self.engine._watch = self.engine._new_watch(None)

    def _end(self) -> None:
        self.ended += 1

    def load(self, ids: Any, slots: Any, streams: Streams | None = None, _: bool = False) -> Slices:
        return self._copy("load", ids, streams)

    def store(self, ids: Any, slots: Any, streams: Streams | None = None) -> Slices:
        return self._copy("store", ids, streams)

    def _copy(self, name: str, ids: Any, streams: Streams | None) -> Iterator[int]:
        assert streams is not None
        for _ in ids:
            streams.blocks.append(partial(self.done.append, name))
            streams.bus.wait_stream(streams.blocks)
            yield 0

    def begin_loads(self, count: int = 1, slices: int = 1, **more: Any) -> None:
        """Plan loads; nothing of them is enqueued unless the step waits for them."""
        ids = tuple(range(slices))
        plan = TransferPlan(
            tuple(Transfer(n, *LOAD, ids, ids) for n in range(1, count + 1)), **more
        )
        self.engine.begin_step(plan)
        self.compute()

    def compute(self) -> None:
        """What was computed before is over; copies do not go on."""
        while self.cuda.current.can_go_on():
            self.cuda.current.go_on()

    def look(self, times: int) -> None:
        for _ in range(times):
            self.watch.look()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setattr(CopyQueue, "top_up", lambda *_, **__: False)
    with FakeCuda() as cuda:
        yield Rank(cuda)


def test_a_copy_on_the_device_that_never_ends_ends_the_engine(
    rank: Rank, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still write to its blocks, so it is not done, and not failed either."""
    rank.begin_loads(2, waits=((LOAD, 1),))
    rank.look(LOOKS)
    assert not rank.watch.overdue and not caplog.records
    assert rank.engine.poll().done == ((LOAD, 0), (STORE, 0))
    with caplog.at_level(logging.ERROR, LOGGER):
        rank.look(1)
    (said,) = [record.message for record in caplog.records]
    assert "expected copy 1 from cpu to gpu to be done by now, found no progress for 60 s" in said
    monkeypatch.setattr(copy_engine, "time", SimpleNamespace())  # nobody naps any more
    wait_done = partial(rank.engine.wait_done, ((LOAD, 1),))
    for call in (rank.engine.poll, partial(rank.engine.begin_step, None), wait_done):
        with pytest.raises(TransferError, match="copy 1 from cpu to gpu .* the device may still"):
            call()
    rank.look(3)
    assert len(caplog.records) == 1, "it is said once"
    assert rank.loads.poll() == 0 and not rank.loads.failed


@pytest.mark.parametrize("ends", [True, False])
def test_a_step_without_tokens_waits_for_a_load_and_no_longer_than_it_may(
    rank: Rank, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else enqueues or computes; a load that never ends is raised by what comes after."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        assert sum(slept) < 1, "it waits for ever"
        slept.append(seconds)
        while ends and rank.loads.poll() < 1:
            rank.cuda.run_one()

    now = SimpleNamespace(sleep=sleep, monotonic=lambda: sum(slept))
    monkeypatch.setattr(copy_engine, "time", now)
    rank.begin_loads(2, waits=((LOAD, 1),))
    rank.engine.wait_loads(0.5)
    assert len(slept) == 1 if ends else 0.5 <= sum(slept) < 0.6


def test_a_copy_that_was_late_and_ends_does_not_end_the_engine(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    rank.begin_loads(waits=((LOAD, 1),))
    rank.look(LOOKS + 1)
    assert rank.watch.overdue
    rank.cuda.run()
    assert rank.engine.poll().done_on(LOAD) == 1, "found before the next look"
    rank.look(1)
    assert not rank.watch.overdue
    assert "make progress again" in caplog.records[-1].message


def test_a_late_copy_that_ends_before_the_next_look_lets_the_next_one_have_its_time(
    rank: Rank,
) -> None:
    rank.begin_loads(2, waits=((LOAD, 1),))
    rank.look(LOOKS + 1)
    assert rank.watch.overdue
    rank.cuda.run()
    assert rank.engine.poll().done_on(LOAD) == 1


def test_a_late_copy_that_a_look_finds_done_while_it_is_checked_raises_nothing(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step has begun to check when the thread of looks comes to it."""
    rank.begin_loads(waits=((LOAD, 1),))
    rank.look(LOOKS + 1)

    with monkeypatch.context() as patched:

        def oldest() -> Oldest | None:
            patched.undo()
            rank.cuda.run()
            rank.look(1)
            return rank.loads.oldest()

        patched.setattr(rank.loads, "oldest", oldest)
        rank.watch.check()
    assert not rank.watch.overdue


def test_a_copy_of_which_nothing_is_enqueued_fails(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.begin_loads(2)
    with caplog.at_level(logging.ERROR, LOGGER):
        rank.look(LOOKS + 1)
    (said,) = [record.message for record in caplog.records]
    assert "expected copy 1 from cpu to gpu to be done by now, found it queued after 60 s" in said
    rank.cuda.run()
    progress = rank.engine.poll()
    assert (progress.done_on(LOAD), progress.failed) == (1, ((LOAD, 1, LATE),))
    assert "queued after 60 s" in rank.engine.failed(((LOAD, 1),))[2]
    assert rank.done == [], "it has moved nothing"
    rank.look(LOOKS)  # a deadline of its own for each
    assert rank.engine.poll().done_on(LOAD) == 1
    rank.engine.drain()
    assert rank.engine.poll().done_on(LOAD) == 2 and rank.done == ["load"]


def test_a_copy_of_which_a_part_is_enqueued_does_not_fail(rank: Rank) -> None:
    rank.begin_loads(slices=3)
    assert rank.loads.advance()
    rank.look(LOOKS + 1)
    assert not rank.loads.failed
    with pytest.raises(TransferError, match="no progress for 60 s"):
        rank.engine.poll()


def test_a_copy_behind_one_on_the_device_does_not_fail(rank: Rank) -> None:
    rank.begin_loads(2, waits=((LOAD, 1),))
    assert not rank.loads.expire(2, "late")
    assert not rank.loads.expire(1, "late")
    assert not rank.loads.failed


def test_a_copy_whose_slice_is_being_enqueued_is_not_waited_for(rank: Rank) -> None:
    """The thread that enqueues it may hang in the driver, with the queues' lock."""
    rank.begin_loads()
    held, over = threading.Event(), threading.Event()

    def hang() -> None:
        with rank.loads._lock:
            held.set()
            over.wait(20)

    thread = threading.Thread(target=hang)
    thread.start()
    held.wait(20)
    try:
        rank.look(LOOKS + 1)
        assert not rank.loads.failed
        with pytest.raises(TransferError, match="no progress for 60 s"):
            rank.engine.begin_step(None)
    finally:
        over.set()
        thread.join()


def test_compute_that_takes_long_is_no_fault_of_the_copy_behind_it(rank: Rank) -> None:
    rank.compute = lambda: None  # type: ignore[method-assign]
    rank.begin_loads(waits=((LOAD, 1),))
    rank.look(3 * LOOKS)
    assert not rank.watch.overdue and not rank.loads.failed
    Rank.compute(rank)
    rank.look(LOOKS)
    assert not rank.watch.overdue, "its time begins now"
    rank.look(1)
    assert rank.watch.overdue


@pytest.mark.parametrize("progress", ["a slice", "a ticket"])
def test_progress_begins_the_time_again(rank: Rank, progress: str) -> None:
    rank.begin_loads(4, slices=9)
    for ticket in range(1, 4):
        rank.look(LOOKS)
        if progress == "a slice":
            assert rank.loads.advance()
        else:
            rank.loads.flush(ticket)
            rank.cuda.run()
    rank.look(LOOKS)
    assert not rank.watch.overdue and not rank.loads.failed


def test_nothing_to_copy_is_never_late(rank: Rank) -> None:
    rank.look(3 * LOOKS)
    rank.begin_loads()
    rank.look(LOOKS)
    assert not rank.watch.overdue and not rank.loads.failed


def test_each_link_has_a_deadline(rank: Rank) -> None:
    rank.engine.begin_step(TransferPlan((), (Transfer(1, *STORE, (1,), (2,)),)))
    rank.engine.end_step()
    rank.stores.flush(1)
    rank.compute()
    rank.look(LOOKS + 1)
    with pytest.raises(TransferError, match="expected copy 1 from gpu to cpu"):
        rank.engine.poll()


@pytest.mark.parametrize("where", ["on the device", "in the driver"])
def test_a_copy_that_holds_up_who_would_raise_ends_the_process(
    where: str, rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream of compute waits for it, or the thread of the step is within a call."""
    if where == "on the device":
        rank.begin_loads(waits=((LOAD, 1),))
        rank.engine.end_step()
    else:
        rank.begin_loads(slices=2)
        rank.loads.advance()
    rank.look(LOOKS + GRACE)
    assert rank.watch.overdue and not rank.ended
    del caplog.records[:]
    rank.look(1)
    assert rank.ended == 1
    (said,) = [record.message for record in caplog.records]
    assert (
        "expected copy 1 from cpu to gpu to be done by now, found no progress for 90 s, 30" in said
    )
    assert "so this process ends: restart the server" in said
    rank.look(3 * GRACE)
    assert rank.ended == 1 and len(caplog.records) == 1


def test_a_process_that_is_not_to_be_ended_is_left_with_a_sentence(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.engine._end = None
    rank.watch = rank.engine._watch = rank.engine._new_watch(None)
    rank.begin_loads(waits=((LOAD, 1),))
    rank.look(LOOKS + GRACE + 9)
    assert not rank.ended
    said = [r.message for r in caplog.records if "this process is not vLLM's own" in r.message]
    assert len(said) == 1 and "copy 1 from cpu to gpu" in said[0]


def test_a_step_that_comes_raises_and_the_process_goes_on(rank: Rank) -> None:
    """Whatever becomes of what it has raised."""
    rank.begin_loads(waits=((LOAD, 1),))
    rank.look(LOOKS + 1)
    for _ in range(5):
        rank.look(GRACE - 1)
        with pytest.raises(TransferError, match="no progress for 60 s"):
            rank.engine.begin_step(None)
    assert not rank.ended
    rank.look(GRACE + 2)
    assert rank.ended, "it has not come again"


@pytest.mark.parametrize("link", [LOAD, STORE], ids=["load", "store"])
def test_a_copy_that_nobody_waits_for_leaves_an_idle_process_as_it_is(
    link: Any, rank: Rank
) -> None:
    """Nothing was promised: it may end yet. The step that comes next raises."""
    transfer = Transfer(1, *link, (1,), (2,))
    before, after = ((transfer,), ()) if link == LOAD else ((), (transfer,))
    rank.engine.begin_step(TransferPlan(before, after))
    rank.engine.end_step()
    rank.engine._links[link].queue.flush(1)
    rank.compute()
    rank.look(LOOKS + 9 * GRACE)
    assert rank.watch.overdue and not rank.ended
    with pytest.raises(TransferError, match="no progress for 60 s"):
        rank.engine.begin_step(None)


def test_a_step_that_raised_holds_nobody_up(rank: Rank) -> None:
    """Who catches that and goes on may have nothing to do for a while."""
    rank.begin_loads(slices=2)
    rank.loads.advance()
    rank.engine.step_raised()
    rank.look(LOOKS + 9 * GRACE)
    assert rank.watch.overdue and not rank.ended
    with pytest.raises(TransferError, match="no progress for 60 s"):
        rank.engine.begin_step(None)


def test_a_late_copy_that_goes_on_begins_the_grace_again(rank: Rank) -> None:
    rank.begin_loads(3, waits=((LOAD, 3),))
    rank.look(LOOKS + GRACE)
    while rank.loads.poll() < 1 and rank.loads.streams.blocks.can_go_on():
        rank.loads.streams.blocks.go_on()
    rank.look(LOOKS + GRACE)
    assert not rank.ended
    rank.look(2)
    assert rank.ended


@pytest.mark.parametrize("goes_on", [True, False], ids=["it ends then", "it never ends"])
def test_a_process_that_is_stopped_meanwhile_is_not_ended_for_that(goes_on: bool) -> None:
    """By a debugger, or with its whole machine: copies are given their time once it goes on."""
    with HungProcess() as process:
        process.wait_until_overdue()
        process.stop_for(HungProcess.GRACE_S)
        if goes_on:
            assert process.status(0.3) is None, process.log()
            process.let_copies_go_on()
            assert process.status(HungProcess.GRACE_S) is None, process.log()
            assert "make progress again" in process.log()
        else:
            assert process.status(20) == HungProcess.STATUS
            assert "so this process ends" in process.log()


def test_draining_raises_when_a_copy_is_late(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an engine that a step has ended would wait for it when it is closed."""
    monkeypatch.setattr(copy_queue.time, "sleep", lambda seconds: rank.look(1))
    rank.begin_loads(waits=((LOAD, 1),))
    rank.engine.end_step()
    for _ in range(2):  # at its deadline, and after it
        with pytest.raises(TransferError, match="copy 1 from cpu to gpu .* no progress for 60 s"):
            rank.engine.drain()
    assert not rank.ended
    rank.cuda.run()
    rank.engine.drain()
    assert rank.done == ["load"]


def test_a_thread_looks_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "DEADLINE_PERIOD_S", 0.001)
    looked, entered = threading.Event(), []

    class Queue:
        def oldest(self) -> Oldest | None:
            assert entered == [threading.current_thread().name]
            looked.set()
            return None

        def expire(self, ticket: int, reason: str) -> bool:
            raise AssertionError

    watch = DeadlineWatch(
        {(CPU, GPU): Queue()}, lambda: entered.append(threading.current_thread().name)
    )
    watch.start()
    assert looked.wait(20)
    watch.close()
    assert kvoffload_threads() == []


def test_an_engine_of_a_device_watches_its_links_until_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeCuda, "is_host", False)
    ours = {"kvoffload-copies", "kvoffload-deadlines"}
    with FakeCuda():
        backend: Any = SimpleNamespace(load=None, store=None, groups=())
        engine: Any = CopyEngine(BlockLayout([torch.zeros(4, 3)], 4), backend)
        assert set(kvoffload_threads()) >= ours
        assert set(engine._watch._queues) == {LOAD, STORE}
        engine.close()
    assert not ours.intersection(kvoffload_threads())


@pytest.mark.parametrize("raises", [None, RuntimeError("the device is gone")])
def test_a_watch_that_cannot_look_says_so_and_leaves_copies_alone(
    raises: Exception | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    monkeypatch.setattr(deadline, "DEADLINE_PERIOD_S", 0.001)
    over = threading.Event()

    class Queue:
        def oldest(self) -> Oldest | None:
            over.set()
            if raises is not None:
                raise raises
            return None

        def expire(self, ticket: int, reason: str) -> bool:
            raise AssertionError

    watch = DeadlineWatch({LOAD: Queue()}, lambda: None)
    watch.start()
    assert over.wait(20)
    watch.close()
    said = [r.message for r in caplog.records if "are not watched" in r.message]
    assert said == (["kvoffload_patch: deadlines of copies are not watched any more (the device is "
                     "gone), so one that hangs may not be noticed; restart the server to have them "
                     "watched."] if raises else [])  # fmt: skip
    assert not watch.overdue


def test_closing_does_not_wait_for_ever_for_a_driver_that_does_not_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deadline, "DEADLINE_PERIOD_S", 0.001)
    monkeypatch.setattr(deadline, "EXIT_S", 0.01)
    inside, over = threading.Event(), threading.Event()
    queue: Any = SimpleNamespace(oldest=lambda: (inside.set(), over.wait(20), None)[-1])
    watch = DeadlineWatch({LOAD: queue}, lambda: None)
    watch.start()
    assert inside.wait(20)
    watch.close()
    assert watch._thread.is_alive()
    over.set()
    watch._thread.join()


def test_a_process_may_end_while_it_looks() -> None:
    trial = """
from types import SimpleNamespace
from kvoffload_patch.transfer import deadline
deadline.DEADLINE_PERIOD_S = 0
memory = torch.zeros(64, dtype=torch.uint8)
queue = SimpleNamespace(oldest=lambda: (memory[::2].zero_(), None)[1])
deadline.DeadlineWatch({("gpu", "cpu"): queue}, lambda: None).start()
"""
    assert exits(trial) == [0] * TIMES


def test_a_store_that_was_late_is_remembered(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank may have made it: then its slot is loaded, and here it has other bytes."""
    monkeypatch.setattr(CopyQueue, "top_up", lambda *_, **__: False)  # nobody enqueues it
    rank.engine.begin_step(TransferPlan((), (Transfer(1, *STORE, (1,), (0,)),)))
    rank.engine.end_step()
    rank.compute()
    rank.look(LOOKS + 1)
    rank.cuda.run()
    assert rank.engine.poll().failed == ((STORE, 1, LATE),)
    load = Transfer(1, *LOAD, (0,), (2,))
    plan = TransferPlan((load,), waits=((LOAD, 1),), done=((STORE, 1),), promised=((LOAD, 1),))
    rank.engine.begin_step(plan)
    assert "earlier copy" in rank.engine.failed(((LOAD, 1),))[2] and rank.done == []
    rank.engine.end_step()


def test_where_no_watch_can_be_started_no_copy_thread_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the system has no more threads: nobody has this engine, so nobody closes it."""

    def none_left(watch: DeadlineWatch) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(DeadlineWatch, "start", none_left)
    with FakeCuda() as cuda:
        rank = Rank(cuda)
        cuda.is_host = False
        with pytest.raises(RuntimeError, match="new thread"):
            CopyEngine(BlockLayout([torch.zeros(4, 3)], 4), rank)
    assert kvoffload_threads() == []
