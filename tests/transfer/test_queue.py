"""`CopyQueue`: copies in order of their tickets, slice by slice, and those that fail."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from transfer.fake_cuda import FakeCuda

from kvoffload_patch.links import MISMATCH, RAISED
from kvoffload_patch.transfer.queue import CopyQueue, SyncCopyQueue


class Setup:
    """Two queues, and a log of what their copies do on the streams."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        lock = threading.RLock()
        self.loads = CopyQueue(cuda, lock, ends_on_bus=False, slices_ahead=2)
        self.stores = CopyQueue(cuda, lock, ends_on_bus=True, slices_ahead=2)
        self.log: list[Any] = []

    def copy(self, name: str, slices: int, fail_after: int | None, streams: Any) -> Iterator[None]:
        """Each slice does something on both streams, and makes each wait for the other."""
        for i in range(slices):
            for stream in ("bus", "blocks"):
                getattr(streams, stream).append(partial(self.log.append, (name, i, stream)))
            if i == fail_after:
                raise OSError(f"{name} failed\n at {i}")
            streams.bus.wait_stream(streams.blocks)
            streams.blocks.wait_stream(streams.bus)
            yield 0
        if fail_after == slices:
            raise ValueError

    def submit(
        self, queue: CopyQueue, ticket: int, slices: int = 2,
        fail_after: int | None = None, behind: int = 0,
    ) -> None:  # fmt: skip
        start = partial(self.copy, f"{ticket}", slices, fail_after)
        other = self.stores if queue is self.loads else self.loads
        queue.submit(ticket, start, [(other, behind)])


@pytest.fixture(params=range(4))
def setup(request: Any) -> Iterator[Setup]:
    with FakeCuda(request.param) as cuda:
        yield Setup(cuda)


def names(log: list[Any]) -> set[str]:
    return {name for name, _, _ in log}


def test_a_slice_is_enqueued_at_a_time(setup: Setup) -> None:
    queue = setup.loads
    setup.submit(queue, 1, slices=2)
    setup.submit(queue, 2, slices=1)
    seen = []
    while queue.advance():
        setup.cuda.run()
        seen.append((len(setup.log) // 2, queue.queued, queue.poll()))
    # Where a copy ends is known when it has no further slice.
    assert seen == [(1, True, 0), (2, True, 0), (2, True, 1), (3, True, 1), (3, False, 2)]
    assert not queue.under_way


def test_flushing_enqueues_the_copies_up_to_a_ticket(setup: Setup) -> None:
    queue = setup.loads
    for ticket in (1, 2, 3, 4):
        setup.submit(queue, ticket)
    queue.flush(1)
    setup.cuda.run()
    assert names(setup.log) == {"1"}
    queue.flush(3)
    setup.cuda.run()
    assert names(setup.log) == {"1", "2", "3"}
    assert queue.poll() == 3
    assert queue.queued, "the fourth is"
    queue.drain()
    assert (queue.poll(), queue.queued, queue.under_way) == (4, False, False)
    assert names(setup.log) == {"1", "2", "3", "4"}


def test_a_stream_that_holds_waits_for_the_tickets_asked_for_and_no_more(setup: Setup) -> None:
    queue = setup.stores
    for ticket in (1, 2, 3):
        setup.submit(queue, ticket)
    waiter = setup.cuda.new_stream()
    queue.hold(waiter, 2)
    waiter.append(lambda: setup.log.append(("waiter", 0, "")))
    assert queue.queued, "the third one is not needed"
    setup.cuda.run()
    assert setup.log[-1][0] == "waiter"
    assert len(setup.log) == 9
    queue.drain()
    before = len(waiter.work)
    queue.hold(waiter, 3)
    assert len(waiter.work) == before, "it is done"


@pytest.mark.parametrize("ahead", [1, 2, 5])
@pytest.mark.parametrize("direction", ["loads", "stores"])
def test_there_is_room_for_so_many_slices_under_way(
    setup: Setup, direction: str, ahead: int
) -> None:
    """Of whatever copies, also of one that fails. Whether there is any is never waited for."""
    on_bus = direction == "stores"
    queue = CopyQueue(setup.cuda, threading.RLock(), on_bus, slices_ahead=5)
    end = queue.streams.bus if on_bus else queue.streams.blocks
    setup.submit(queue, 1, slices=3)
    setup.submit(queue, 2, slices=4, fail_after=1)
    setup.submit(queue, 3, slices=9)
    enqueued, ends = 0, []
    while queue.queued:
        before, room = len(setup.log), queue.has_room(ahead)
        assert len(setup.log) == before, "it has waited"
        under_way = sum(not is_over() for is_over in ends)
        assert room == (under_way < ahead)
        if room:
            queue.advance()
            enqueued += 1
            # Behind the last slice of a copy goes the end of its ticket as well.
            given = end.given - (enqueued in (4, 4 + 2, 4 + 2 + 10))
            ends.append(lambda given=given: end.done >= given)
        else:
            setup.cuda.run_one()
    assert enqueued == len(ends) == 4 + 2 + 10
    setup.cuda.run()
    assert queue.has_room(ahead)


def test_slices_that_a_step_needed_at_once_take_room_too(setup: Setup) -> None:
    queue = setup.stores
    assert queue.has_room(2), "nothing has been enqueued yet"
    setup.submit(queue, 1, slices=6)
    queue.hold(setup.cuda.new_stream(), 1)
    while not queue.has_room(2):
        setup.cuda.run_one()
    left = [entry for entry in setup.log if entry[2] == "bus"]
    # Seven ends, two of which may be missing: the last is that of no slice.
    assert len(left) >= 5


def test_it_is_topped_up_until_so_many_slices_are_under_way(setup: Setup) -> None:
    queue = CopyQueue(setup.cuda, threading.RLock(), ends_on_bus=False, slices_ahead=4)

    def enqueued() -> int:
        return queue.streams.bus.given

    assert not queue.top_up(4), "there is nothing"
    setup.submit(queue, 1, slices=1)
    setup.submit(queue, 2, slices=9)
    assert queue.advance()
    before = enqueued()
    assert not queue.top_up(1), "one is under way"
    assert enqueued() == before
    assert queue.top_up(3)
    assert not (queue.has_room(3) or queue.top_up(3))
    assert queue.has_room(4)
    while not queue.has_room(2):
        setup.cuda.run_one()
    assert queue.top_up(4)
    assert not queue.has_room(4)
    setup.cuda.run()
    seen: list[int] = []
    before = enqueued()
    assert queue.top_up(2, meanwhile=lambda: seen.append(enqueued() - before))
    assert len(seen) == 2
    assert 0 < seen[0] < seen[1]
    while queue.top_up(4):
        setup.cuda.run()
    assert not queue.queued
    assert len(setup.log) == 2 * (1 + 9)


def test_a_copy_goes_behind_compute_and_behind_the_other_queue(setup: Setup) -> None:
    setup.submit(setup.stores, 1)
    setup.cuda.current.append(lambda: setup.log.append(("compute", 0, "")))
    setup.submit(setup.loads, 2, behind=1)
    setup.loads.flush(2)
    assert not setup.stores.queued
    setup.loads.drain()
    at = {what: index for index, what in enumerate(setup.log)}
    assert at["1", 1, "bus"] < min(at["2", 0, "bus"], at["2", 0, "blocks"])
    assert at["compute", 0, ""] < at["2", 0, "blocks"]


@pytest.mark.parametrize("direction", ["loads", "stores"])
def test_a_copy_does_not_begin_before_what_the_step_was_given(setup: Setup, direction: str) -> None:
    """However late that is: every other stream goes on as far as it can."""
    setup.cuda.current.append(lambda: setup.log.append("compute"))
    setup.submit(getattr(setup, direction), 1)
    getattr(setup, direction).flush(1)
    others = [stream for stream in setup.cuda.streams if stream is not setup.cuda.current]
    while late := [stream for stream in others if stream.can_go_on()]:
        late[0].go_on()
    assert all(stream == "bus" for _, _, stream in setup.log), "it would read or write blocks"
    setup.cuda.run()
    assert setup.log.index("compute") < setup.log.index(("1", 0, "blocks"))
    assert len(setup.log) == 1 + 4


def test_a_copy_whose_bytes_are_wrong_has_failed_when_it_is_done(setup: Setup) -> None:
    """Asked once, and not before; it is never seen done and right."""
    queue, asked = setup.loads, []

    def start(streams: Any) -> Iterator[None]:
        yield from setup.copy("1", 2, None, streams)
        return lambda: asked.append(len(setup.log)) or "it has other bytes"

    queue.submit(1, start, [(setup.stores, 0)])
    setup.submit(queue, 2)
    queue.flush(2)
    while queue.poll() < 1:
        assert not (queue.failed or asked)
        setup.cuda.run_one()
    assert queue.failed == {1: (MISMATCH, "it has other bytes")}
    queue.drain()
    assert queue.poll() == 2 and len(asked) == 1 and asked[0] >= 4
    assert set(queue.failed) == {1}


def test_a_copy_whose_end_cannot_be_marked_is_not_taken_for_right(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is enqueued, and what it says of its bytes would be lost."""

    def start(streams: Any) -> Iterator[None]:
        yield from setup.copy("1", 1, None, streams)
        monkeypatch.setattr(setup.cuda, "new_event", broken)
        return lambda: "it has other bytes"

    def broken() -> Any:
        monkeypatch.undo()
        raise OSError("no event")

    setup.loads._groups = 2
    setup.loads.submit(1, start, [(setup.stores, 0)])
    setup.loads.drain()
    assert setup.loads.failed[1].reason in (RAISED, MISMATCH)


@pytest.mark.parametrize("fail_after", [0, 1, 2, 3])
@pytest.mark.parametrize("direction", ["loads", "stores"])
def test_a_copy_that_fails_is_done_when_what_there_is_of_it_is(
    setup: Setup, direction: str, fail_after: int
) -> None:
    queue: CopyQueue = getattr(setup, direction)
    setup.submit(queue, 1)
    setup.submit(queue, 2, slices=3, fail_after=fail_after)
    setup.submit(queue, 3)
    queue.flush(2)
    wanted = "ValueError" if fail_after == 3 else f"2 failed at {fail_after}"
    assert queue.failed == {2: (RAISED, wanted)}
    end = queue.streams.blocks if direction == "loads" else queue.streams.bus
    while queue.poll() < 2:  # the other stream is as late as it can be
        setup.cuda.run_one(setup.cuda.streams.index(end))
    slices = min(3, fail_after + 1)  # what the last one has enqueued included
    assert len([name for name, _, _ in setup.log if name == "2"]) == 2 * slices
    queue.drain()
    assert queue.poll() == 3
    assert len([name for name, _, _ in setup.log if name == "3"]) == 4
    assert set(queue.failed) == {2}


def test_a_copy_that_does_not_even_start_fails(setup: Setup) -> None:
    def start(streams: object) -> Any:
        raise MemoryError("no room")

    setup.loads.submit(1, start, [(setup.stores, 0)])
    setup.submit(setup.loads, 2)
    setup.loads.drain()
    assert setup.loads.failed == {1: (RAISED, "no room")}
    assert setup.loads.poll() == 2


def test_polling_does_not_wait_for_a_slice_that_is_being_enqueued(setup: Setup) -> None:
    queue, inside, go_on = setup.loads, threading.Event(), threading.Event()

    def start(streams: object) -> Iterator[None]:
        inside.set()
        go_on.wait(20)
        yield 0

    setup.submit(queue, 1)
    queue.flush(1)
    queue.submit(2, start, [(setup.stores, 0)])
    thread = threading.Thread(target=queue.advance)
    thread.start()
    inside.wait(20)
    assert queue.poll() in (0, 1)
    setup.submit(queue, 3)  # nor does submitting
    queue.hold(None, 0)
    assert thread.is_alive()
    go_on.set()
    thread.join()
    queue.drain()
    assert queue.poll() == 3


def test_an_event_that_another_thread_takes_first_is_replaced(setup: Setup) -> None:
    class TakenByOthers(list):  # type: ignore[type-arg]
        def __bool__(self) -> bool:
            return True

    setup.loads._spare = TakenByOthers()
    setup.submit(setup.loads, 1)
    setup.loads.drain()
    assert setup.loads.poll() == 1


def test_one_thread_submits_while_another_one_enqueues() -> None:
    class Point:
        """Stream and event; whatever is enqueued is done."""

        query = staticmethod(lambda: True)

        def nothing(self, *args: object) -> None:
            pass

        record = wait_event = wait_stream = synchronize = nothing

    device: Any = SimpleNamespace(
        new_stream=lambda priority: Point(), new_event=Point, current_stream=Point
    )
    queue = CopyQueue(device, threading.RLock(), ends_on_bus=True, slices_ahead=2)
    count, errors, over = 5_000, [], threading.Event()

    def enqueue() -> None:
        try:
            while queue.advance() or not over.is_set():
                pass
        except BaseException as error:  # noqa: BLE001 - for the test
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=enqueue)
    thread.start()
    try:
        for ticket in range(1, count + 1):
            queue.submit(ticket, lambda streams: iter(()), [(SyncCopyQueue(), 0)])
            queue.poll()
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before)
    queue.drain()
    assert errors == []
    assert queue.poll() == count
    assert not queue.failed


@pytest.mark.parametrize("direction", ["loads", "stores"])
def test_what_is_abandoned_is_over_when_both_streams_have_done_what_they_were_given(
    setup: Setup, direction: str
) -> None:
    """Of a copy that is enqueued in part neither waits for the other yet; memory is freed then."""
    queue = getattr(setup, direction)

    def start(streams: Any) -> Iterator[int]:
        for stream in (streams.bus, streams.blocks):
            stream.append(partial(setup.log.append, "given"))
        yield 0

    queue.submit(1, start, ())
    assert queue.advance()
    end = queue.abandon()
    setup.cuda.run_until(end.query)
    assert setup.log == ["given"] * 2 and not queue.queued


def test_only_the_copy_that_is_late_fails_and_others_go_on_after_that(setup: Setup) -> None:
    """Who has found it late may say so when it is done, and another one has come to the front."""
    queue = setup.loads
    setup.submit(queue, 1)
    queue.drain()
    assert not queue.expire(1, "late"), "nothing is queued"
    setup.submit(queue, 2)
    setup.submit(queue, 3)
    assert not queue.expire(1, "late") and not queue.failed
    assert queue.expire(2, "late") and list(queue.failed) == [2]
    # The thread that enqueues is another one.
    thread = threading.Thread(target=queue.flush, args=(3,), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and not queue.queued


def test_the_cpu_device_copies_at_once_and_fails_at_once() -> None:
    queue, calls = SyncCopyQueue(), []

    def start(fails: bool, streams: object) -> Iterator[None]:
        assert streams is None
        for _ in range(3):
            calls.append(fails)
            yield 0
        if fails:
            raise OSError("not\nhere")

    queue.submit(1, partial(start, False), [(queue, 0)])
    assert (queue.poll(), queue.failed, calls) == (1, {}, [False] * 3)
    queue.submit(2, partial(start, True), [(queue, 0)])
    assert queue.poll() == 2
    assert queue.failed == {2: (RAISED, "not here")}
    assert not (queue.queued or queue.under_way or queue.advance() or queue.top_up(9))
    assert queue.has_room(1)


def test_the_cpu_device_asks_at_once_whether_bytes_are_right() -> None:
    queue = SyncCopyQueue()

    def start(reason: str | None, streams: object) -> Iterator[None]:
        yield 0
        return lambda: reason

    queue.submit(1, partial(start, None), [(queue, 0)])
    queue.submit(2, partial(start, "other bytes"), [(queue, 0)])
    assert (queue.poll(), queue.failed) == (2, {2: (MISMATCH, "other bytes")})


def test_a_copy_that_is_interrupted_has_failed(setup: Setup) -> None:
    """As by Ctrl-C in a process that goes on: half of it would count as all of it."""
    lost: list[int] = []

    def start(streams: Any) -> Iterator[int]:
        streams.bus.append(partial(setup.log.append, "half"))
        yield 0
        raise KeyboardInterrupt

    setup.loads.submit(1, start, (), lambda: lost.append(1))
    assert setup.loads.advance()
    with pytest.raises(KeyboardInterrupt):
        setup.loads.advance()
    assert not setup.loads.queued and lost == [1]
    setup.cuda.run()
    assert (setup.loads.poll(), setup.loads.failed[1].reason) == (1, RAISED)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("ends_well", [True, False])
def test_a_copy_that_fails_at_a_slice_ends_before_another_one_begins(
    setup: Setup, error: type[BaseException], ends_well: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by an event that cannot be had. What its slices clear up with is a part of it."""
    lock: Any = threading.RLock()
    queue = CopyQueue(setup.cuda, lock, ends_on_bus=False, slices_ahead=2, groups=1)

    def start(streams: Any) -> Iterator[int]:
        try:
            yield 1
        finally:
            setup.log.append(f"held: {lock._is_owned()}")
            streams.blocks.append(partial(setup.log.append, "cleared"))
            if not ends_well:
                raise ValueError

    def broken() -> Any:
        monkeypatch.undo()
        raise error("no event")

    queue.submit(1, start, ())
    setup.submit(queue, 2)
    monkeypatch.setattr(setup.cuda, "new_event", broken)
    try:
        queue.advance()
    except KeyboardInterrupt:  # its traceback lasts to the end of this
        queue.advance()
    assert queue.failed[1].text == "no event" and setup.log == ["held: True"]
    setup.cuda.run_until(lambda: queue.poll() == 1)
    assert "cleared" in setup.log
    queue.drain()
    assert queue.poll() == 2 and list(queue.failed) == [1]


@pytest.mark.parametrize("named", [True, False])
def test_a_copy_that_another_thread_finds_done_meanwhile_is_not_waited_for(
    setup: Setup, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, flush = setup.loads, setup.loads.flush

    def flush_and_lose(ticket: int) -> None:
        flush(ticket)
        setup.cuda.run_until(lambda: queue.poll() == 1)

    setup.submit(queue, 1)
    monkeypatch.setattr(queue, "flush", flush_and_lose)
    waiter = setup.cuda.new_stream()
    queue.hold(waiter if named else None, 1)
    assert not waiter.work and not queue.awaited()


def test_an_interrupted_copy_of_the_cpu_device_has_failed() -> None:
    queue, lost = SyncCopyQueue(), []

    def start(streams: object) -> Iterator[int]:
        yield 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        queue.submit(1, start, (), lambda: lost.append(1))
    assert (queue.poll(), queue.failed[1].reason, lost) == (1, RAISED, [1])
