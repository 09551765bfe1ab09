"""An engine that is dropped unclosed: nothing is freed under the device, and all after that."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from transfer.fake_cuda import FakeCuda
from transfer.registrars import Registrar
from transfer.resident import is_mapped, kvoffload_threads

from kvoffload_patch.links import LOAD, STORE
from kvoffload_patch.plan import Transfer, TransferPlan
from kvoffload_patch.transfer import deadline
from kvoffload_patch.transfer.backends.base import Slices, Streams
from kvoffload_patch.transfer.engine import CopyEngine
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.memory.host_buffer import HostBuffer

OURS = {"kvoffload-copies", "kvoffload-deadlines"}


class Buffers:
    """A backend each of whose blocks is a slice that does something on both streams."""

    name = "buffers"
    groups = ()

    def __init__(self, slots: torch.Tensor) -> None:
        self.slots = slots
        self.done: list[int] = []

    def load(self, ids: Any, slots: Any, streams: Streams | None = None, _: bool = False) -> Slices:
        return self._copy(ids, streams)

    def store(self, ids: Any, slots: Any, streams: Streams | None = None) -> Slices:
        return self._copy(ids, streams)

    def _copy(self, ids: Any, streams: Any) -> Iterator[int]:
        done = self.done  # the work knows no memory, as the device does not
        for number, i in enumerate(ids):
            if number:
                yield 0
            streams.blocks.append(partial(done.append, i))
            streams.bus.wait_stream(streams.blocks)
            streams.bus.append(partial(done.append, i))
            streams.blocks.wait_stream(streams.bus)


class Rank:
    """What has an engine, the memory of its slots, and its KV tensors."""

    def __init__(self, registrar: Registrar) -> None:
        here = torch.device("cpu")
        self.host = HostBuffer(8, 1 << 20, here, piece_bytes=4 << 20, registrar=registrar)
        self.host.wait_ready(8)
        self.kv = torch.zeros(40, 3)
        self.backend = Buffers(self.host.slots)
        copies: Any = self.backend
        self.engine = CopyEngine(BlockLayout([self.kv], 40), copies, self.host.wait_ready)
        self.itself = self  # only the garbage collector finds that nobody has it


def wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not until():
        assert time.monotonic() < end, "it did not come so far"
        time.sleep(0.001)


def drop(ranks: list[Rank]) -> Any:
    """Drop the only rank, and wait until that was seen; the thread that is left."""
    watch: Any = ranks[0].engine._watch
    gone = weakref.ref(ranks.pop().engine)
    gc.collect()
    assert gone() is None
    wait(lambda: bool(watch._is_over.__self__._ends))  # now nobody enqueues anything any more
    wait(lambda: "kvoffload-copies" not in kvoffload_threads())
    return watch._thread


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr(FakeCuda, "is_host", False)
    monkeypatch.setattr(deadline, "DEADLINE_PERIOD_S", 0.01)
    with FakeCuda() as made:
        yield made


def copy(rank: Rank, link: Any, blocks: int) -> None:
    """Begin a copy, of one block as a whole, of many in part."""
    ids = tuple(range(blocks))
    copies = (Transfer(1, *link, ids, tuple(i % 8 for i in ids)),)
    rank.engine.begin_step(TransferPlan(*((copies, ()) if link == LOAD else ((), copies))))
    rank.engine.end_step()
    queue = rank.engine._links[link].queue
    wait(lambda: not queue.has_room(1) and queue.queued == (blocks > 1))


@pytest.mark.parametrize("link", [LOAD, STORE])
@pytest.mark.parametrize("blocks", [1, 40])
def test_what_the_device_may_use_stays_until_it_is_done(
    cuda: FakeCuda, link: Any, blocks: int
) -> None:
    """What is queued is not enqueued any more."""
    registrar = Registrar()
    ranks = [rank := Rank(registrar)]
    address, done = rank.host.slots.data_ptr(), rank.backend.done
    held = [weakref.ref(one) for one in (rank.kv, rank.backend, rank.host)]
    copy(rank, link, blocks)
    del rank
    drop(ranks)
    time.sleep(0.05)  # some looks
    assert all(one() is not None for one in held) and is_mapped(address) and registrar.held
    cuda.run()
    assert 0 < len(done) < 80
    wait(lambda: not kvoffload_threads())
    assert [one() for one in held] == [None] * 3
    assert not is_mapped(address) and not registrar.held and cuda.idle


def test_what_a_late_copy_may_use_stays_as_well(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can say any more whether anybody waits for it."""
    monkeypatch.setattr(deadline, "DEADLINE_S", 0.02)
    registrar = Registrar()
    ranks = [rank := Rank(registrar)]
    held = weakref.ref(rank.host)
    copy(rank, LOAD, 1)
    while cuda.current.can_go_on():
        cuda.current.go_on()
    watch: Any = weakref.proxy(rank.engine._watch)
    wait(lambda: watch.overdue)
    del rank
    drop(ranks)
    time.sleep(0.05)  # some looks
    assert held() is not None and registrar.held and kvoffload_threads()
    cuda.run()
    wait(lambda: not kvoffload_threads())
    assert held() is None and not registrar.held


def test_the_end_of_the_process_frees_nothing_under_the_device(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "_NOT_FREED", kept := [])
    registrar = Registrar()
    ranks = [rank := Rank(registrar)]
    held = [weakref.ref(one) for one in (rank.kv, rank.backend, rank.host)]
    copy(rank, LOAD, 1)
    del rank
    thread = drop(ranks)
    thread.request_stop()
    thread.join(60)
    assert all(one() is not None for one in held) and registrar.held
    cuda.run()
    kept.clear()
    assert [one() for one in held] == [None] * 3


def test_one_without_copies_leaves_nothing(cuda: FakeCuda) -> None:
    registrar = Registrar()
    ranks = [Rank(registrar)]
    address = ranks[0].host.slots.data_ptr()
    assert set(kvoffload_threads()) >= OURS
    drop(ranks)
    cuda.run()
    wait(lambda: not kvoffload_threads())
    assert not is_mapped(address) and not registrar.held


def test_one_that_somebody_has_goes_on(cuda: FakeCuda) -> None:
    rank = Rank(Registrar())
    looked = threading.Event()
    watch: Any = rank.engine._watch
    watch.look = looked.set
    assert looked.wait(60) and set(kvoffload_threads()) == OURS
    rank.engine.close()
    rank.host.close()
