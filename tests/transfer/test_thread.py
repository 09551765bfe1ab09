"""`CopyThread`: each direction as far ahead as there is room, and an end that is said."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from exits import TIMES, exits
from transfer.fake_cuda import FakeCuda
from transfer.resident import kvoffload_threads

from kvoffload_patch.transfer import thread as copy_thread
from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.queue import CopyQueue
from kvoffload_patch.transfer.thread import THREAD_LOAD_SLICES, THREAD_STORE_SLICES, CopyThread

LONG_S = 20.0


class FakeQueue:
    """Slices to enqueue, room for some, and a log of what the thread does."""

    def __init__(self, name: str, ahead: int, log: list[str]) -> None:
        self.name = name
        self.ahead = ahead
        self.log = log
        self.slices = 0
        self.room = 10**9
        self.error: BaseException | None = None
        self.error_of_room: BaseException | None = None

    @property
    def queued(self) -> bool:
        return self.slices > 0

    def has_room(self, ahead: int) -> bool:
        assert ahead == self.ahead
        if self.error_of_room is not None:
            raise self.error_of_room
        return self.room > 0

    def advance(self) -> bool:
        if self.error is not None:
            raise self.error
        if not self.slices:
            return False
        self.log.append(self.name)
        self.room -= 1
        self.slices -= 1  # last: it is what the test waits for
        return True

    def top_up(self, ahead: int) -> bool:
        found = False
        while self.has_room(ahead) and self.advance():
            found = True
        return found


class Setup:
    """A thread over two queues.

    Attributes:
        on_nap: called when the thread naps, in the thread, with how many times it has.
        naps: how long each of them was to be.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.loads = FakeQueue("load", copy_thread.THREAD_LOAD_SLICES, self.log)
        self.stores = FakeQueue("store", copy_thread.THREAD_STORE_SLICES, self.log)
        self.thread: Any = None
        self.device: Any = SimpleNamespace(use=lambda: None)
        self.naps: list[float] = []
        self.on_nap: Callable[[int], object] = lambda number: None
        setup = self

        class Event(threading.Event):
            """Waits with a limit are naps."""

            def wait(self, timeout: float | None = None) -> bool:
                if timeout is not None:
                    setup.log.append("nap")
                    setup.naps.append(timeout)
                    setup.on_nap(len(setup.naps))
                return super().wait(timeout)

        self.threading = SimpleNamespace(Event=Event)

    def start(self) -> CopyThread:
        queues: Any = ([self.loads], [self.stores])
        self.thread = CopyThread(self.device, *queues)
        return self.thread

    def run(self) -> list[str]:
        """Wake the thread, and wait until all is enqueued."""
        if self.thread is None:
            self.start()
        self.thread.wake()
        thread = self.thread._thread
        wait(lambda: not (self.loads.queued or self.stores.queued) or not thread.is_alive())
        assert self.thread._error is None
        return self.log


def wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG_S
    while not until():
        assert time.monotonic() < end, "the thread did not come so far"
        time.sleep(0.001)


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    made = Setup()
    monkeypatch.setattr(copy_thread, "threading", made.threading)
    yield made
    if made.thread is not None:
        made.thread.close()


def test_both_directions_go_on_side_by_side(setup: Setup) -> None:
    setup.loads.slices, setup.stores.slices = 3, 5
    assert setup.run() == [*["load"] * 3, *["store"] * 5]


def test_loads_go_before_the_next_slice_of_a_store(setup: Setup) -> None:
    """A store's slices are given one by one, and loads are looked after between them."""
    setup.stores.slices, advance = 4, setup.stores.advance

    def advance_and_load() -> bool:
        if setup.stores.slices == 2:
            setup.loads.slices = 2
        return advance()

    setup.stores.advance = advance_and_load  # type: ignore[method-assign]
    assert setup.run() == [*["store"] * 3, *["load"] * 2, "store"]


def test_loads_that_never_end_do_not_keep_a_store_waiting(setup: Setup) -> None:
    def one_more(ahead: int) -> bool:
        setup.log.append("load")
        return True

    setup.loads.top_up = one_more  # type: ignore[method-assign]
    setup.stores.slices = 5
    assert setup.run() == ["load", "store"] * 5


def test_loads_alone_do_not_wait_for_anything(setup: Setup) -> None:
    setup.loads.slices = 4
    assert setup.run() == ["load"] * 4


def test_each_wake_is_answered(setup: Setup) -> None:
    for _ in range(50):
        setup.loads.slices += 1
        setup.stores.slices += 1
        setup.run()
    wait(lambda: setup.log.count("store") == setup.log.count("load") == 50)


def test_a_direction_without_room_does_not_keep_the_other_one(setup: Setup) -> None:
    setup.loads.slices, setup.stores.slices = 5, 5
    setup.loads.room = 1

    def on_nap(number: int) -> None:
        assert setup.log == ["load", "store", *["store"] * 4, "nap"]
        setup.loads.room = 4
        setup.on_nap = lambda number: None

    setup.on_nap = on_nap
    assert setup.run() == ["load", *["store"] * 5, "nap", *["load"] * 4]


def test_it_naps_while_neither_direction_has_room(setup: Setup) -> None:
    setup.loads.slices, setup.stores.slices = 2, 2
    setup.loads.room = setup.stores.room = 0

    def on_nap(number: int) -> None:
        if number == 3:
            setup.stores.room = 1
        elif number == 4:
            setup.loads.room, setup.stores.room = 2, 1

    setup.on_nap = on_nap
    assert setup.run() == [*["nap"] * 3, "store", "nap", "load", "load", "store"]
    assert setup.naps == [copy_thread.THREAD_SLEEP_S] * 4


def test_a_load_that_comes_while_a_large_store_waits_for_room_goes_at_once(setup: Setup) -> None:
    setup.stores.slices, setup.stores.room = 40, 4

    def on_nap(number: int) -> None:
        if number == 1:
            setup.loads.slices = 6
        else:
            setup.stores.room = 4

    setup.on_nap = on_nap
    log = setup.run()
    assert log[:12] == [*["store"] * 4, "nap", *["load"] * 6, "nap"]
    assert log.count("store") == 40


def test_a_load_that_comes_during_a_nap_ends_it(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_thread, "THREAD_SLEEP_S", LONG_S)
    setup.stores.slices, setup.stores.room = 2, 1
    thread = setup.start()
    begin = time.monotonic()
    thread.wake()
    for count in (1, 2):
        wait(lambda count=count: len(setup.naps) == count)
        setup.loads.slices = 1
        thread.wake()
        wait(lambda: not setup.loads.queued)
    assert time.monotonic() - begin < LONG_S / 2
    assert setup.log[:5] == ["store", "nap", "load", "nap", "load"]


def test_closing_ends_it_also_while_nothing_has_room(setup: Setup) -> None:
    setup.loads.slices, setup.loads.room = 1, 0
    setup.stores.slices, setup.stores.room = 1, 0
    thread = setup.start()
    thread.wake()
    wait(lambda: len(setup.naps) > 3)
    begin = time.monotonic()
    thread.close()
    assert time.monotonic() - begin < LONG_S / 2
    assert (setup.loads.slices, setup.stores.slices) == (1, 1)
    assert kvoffload_threads() == []


def test_closing_does_not_wait_for_ever_for_a_driver_that_does_not_return(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_thread, "EXIT_S", 0.01)
    inside, over = threading.Event(), threading.Event()

    def advance() -> bool:
        inside.set()
        over.wait(LONG_S)
        return False

    setup.loads.slices, setup.loads.advance = 1, advance  # type: ignore[method-assign]
    thread = setup.start()
    thread.wake()
    inside.wait(LONG_S)
    begin = time.monotonic()
    thread.close()
    assert time.monotonic() - begin < LONG_S / 2 and thread._thread.is_alive()
    over.set()
    thread._thread.join()


def test_it_rests_when_nothing_is_queued(setup: Setup) -> None:
    setup.loads.slices = 1
    setup.run()
    setup.loads.room = setup.stores.room = 0
    time.sleep(0.02)
    assert setup.naps == []


@pytest.mark.parametrize("what", ["error", "error_of_room"])
@pytest.mark.parametrize("queue", ["loads", "stores"])
def test_an_error_of_the_thread_is_said_by_the_next_wake(
    setup: Setup, queue: str, what: str
) -> None:
    thread = setup.start()
    getattr(setup, queue).slices = 1
    setattr(getattr(setup, queue), what, RuntimeError("the device is gone"))
    thread.wake()
    wait(lambda: not thread._thread.is_alive())
    with pytest.raises(TransferError, match=r"ended \(the device is gone\), so the CPU tier"):
        thread.wake()


def test_a_device_that_cannot_be_used_is_said_too(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no such device")

    setup.device.use = fail
    thread = setup.start()
    wait(lambda: not thread._thread.is_alive())
    with pytest.raises(TransferError, match="no such device"):
        thread.wake()


# Over queues on streams. The thread itself rests; the test does what it would, and the device's
# work in between.


class OnStreams:
    """Queues on a `FakeCuda`, with copies of many slices."""

    def __init__(self, cuda: FakeCuda) -> None:
        lock = threading.RLock()
        self.cuda = cuda
        self.loads = CopyQueue(cuda, lock, False, THREAD_LOAD_SLICES)
        self.stores = CopyQueue(cuda, lock, True, THREAD_STORE_SLICES)
        self.thread = CopyThread(cuda, [self.loads], [self.stores])
        self.enqueued = {"load": 0, "store": 0}
        self.finished = {"load": 0, "store": 0}

    def submit(self, queue: CopyQueue, ticket: int, name: str, slices: int) -> None:
        other = self.stores if queue is self.loads else self.loads
        queue.submit(ticket, lambda streams: self._slices(name, slices, streams), [(other, 0)])

    def _slices(self, name: str, slices: int, streams: Any) -> Iterator[None]:
        first, last = streams.bus, streams.blocks
        if name == "store":
            first, last = last, first
        for _ in range(slices):
            first.append(int)
            last.wait_stream(first)
            last.append(lambda: self.finished.update({name: self.finished[name] + 1}))
            self.enqueued[name] += 1
            yield 0

    def under_way(self, name: str) -> int:
        return self.enqueued[name] - self.finished[name]


@pytest.fixture(params=range(6))
def on_streams(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnStreams]:
    monkeypatch.setattr(copy_thread, "THREAD_SLEEP_S", 0)
    with FakeCuda(request.param) as cuda:
        made = OnStreams(cuda)
        yield made
        made.thread.close()


def test_a_large_store_does_not_keep_a_later_load_waiting(on_streams: OnStreams) -> None:
    it, slices = on_streams, 200
    it.submit(it.stores, 1, "store", slices)
    for _ in range(2 * THREAD_STORE_SLICES):
        it.thread._advance()
    assert it.enqueued["store"] == THREAD_STORE_SLICES, "not all of a store at once"
    it.submit(it.loads, 1, "load", THREAD_LOAD_SLICES)
    it.thread._advance()
    assert it.enqueued == {"load": THREAD_LOAD_SLICES, "store": THREAD_STORE_SLICES}, (
        "without waiting"
    )
    while it.loads.poll() < 1:
        it.thread._advance()
        it.cuda.run_one()
        assert it.under_way("store") <= THREAD_STORE_SLICES
    assert it.stores.queued
    while it.stores.poll() < 1:
        it.thread._advance()
        it.cuda.run_one()
        assert it.under_way("store") <= THREAD_STORE_SLICES
    assert it.finished == {"load": THREAD_LOAD_SLICES, "store": slices}


def test_a_large_load_does_not_keep_a_store_waiting(on_streams: OnStreams) -> None:
    """Both ways of the bus are busy all the time, each as far ahead as it may be."""
    it, slices = on_streams, 200
    it.submit(it.loads, 1, "load", slices)
    it.submit(it.stores, 1, "store", slices)
    for _ in range(2 * THREAD_STORE_SLICES):
        it.thread._advance()
    ahead = {"load": THREAD_LOAD_SLICES, "store": THREAD_STORE_SLICES}
    assert it.enqueued == ahead
    while it.loads.queued and it.stores.queued:
        it.cuda.run_one()
        for _ in range(2):
            it.thread._advance()
        for name, most in ahead.items():
            assert it.under_way(name) <= most
            # One more may have ended, its end not yet.
            assert it.under_way(name) >= most - 1 or it.enqueued[name] == slices
    assert min(it.finished.values()) > slices // 3


def test_a_process_may_end_while_the_thread_enqueues() -> None:
    trial = """
from types import SimpleNamespace
from kvoffload_patch.transfer.thread import CopyThread
memory = torch.zeros(64, dtype=torch.uint8)
def top_up(ahead):
    memory[::2].zero_()
    return True
loads = SimpleNamespace(queued=True, top_up=top_up)
CopyThread(SimpleNamespace(use=lambda: None), [loads], []).wake()
"""
    assert exits(trial) == [0] * TIMES
