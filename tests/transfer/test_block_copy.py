"""`BlockCopy`: copies of few blocks that a `CopyQueue` enqueues as one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
from transfer.fake_cuda import FakeCuda

from kvoffload_patch.links import RAISED
from kvoffload_patch.transfer.block_copy import BlockCopy
from kvoffload_patch.transfer.queue import CopyQueue


class Together:
    """A queue of stores that come together, and one of loads; a copy moves words at once."""

    def __init__(self, cuda: FakeCuda, together: int = 4) -> None:
        self.cuda = cuda
        lock = threading.RLock()
        self.loads = CopyQueue(cuda, lock, ends_on_bus=False, slices_ahead=2)
        self.stores = CopyQueue(cuda, lock, ends_on_bus=True, slices_ahead=2, together=together)
        self.gpu: dict[int, str] = {}
        self.slots: dict[int, str] = {}
        self.begun: list[tuple[int, ...]] = []
        self.fails = False

    def _store(self, ids: Sequence[int], slots: Sequence[int], streams: Any) -> Iterator[int]:
        self.begun.append((*slots,))
        for block, slot in zip(ids, slots):
            streams.blocks.append(lambda b=block, s=slot: self.slots.update({s: self.gpu[b]}))
            yield 0
        if self.fails:
            raise OSError("no such slot")
        streams.bus.wait_stream(streams.blocks)

    def store(self, ticket: int, ids: list[int], slots: list[int], behind: int = 0) -> None:
        """Compute the blocks, and store them: each word says which ticket stores it."""
        for block in ids:
            self.cuda.current.append(lambda b=block: self.gpu.update({b: f"{b} of {ticket}"}))
        self.stores.submit(ticket, BlockCopy(self._store, ids, slots), [(self.loads, behind)])


@pytest.fixture(params=range(4))
def together(request: Any) -> Iterator[Together]:
    with FakeCuda(request.param) as cuda:
        yield Together(cuda)


def test_copies_of_few_blocks_are_enqueued_as_one(together: Together) -> None:
    queue = together.stores
    assert queue.few
    for ticket, blocks in enumerate(([1], [2, 3], [4], [5, 6]), 1):
        together.store(ticket, blocks, [10 * block for block in blocks])
    assert not queue.few, "the last ones are for another copy"
    queue.flush(2)  # the third one comes along
    assert together.begun == [(10, 20, 30, 40)] and queue.few
    assert not queue.has_queued(3) and queue.has_queued(4)
    while queue.poll() < 1:
        together.cuda.run_one()
    assert queue.poll() == 3
    queue.drain()
    assert queue.poll() == 4 and together.begun[1:] == [(50, 60)]
    wanted = {10: "1 of 1", 20: "2 of 2", 30: "3 of 2", 40: "4 of 3", 50: "5 of 4", 60: "6 of 4"}
    assert together.slots == wanted


def test_a_step_that_waits_for_one_of_them_waits_for_all_of_their_slices(
    together: Together,
) -> None:
    for ticket in (1, 2, 3):
        together.store(ticket, [ticket], [ticket])
    assert together.stores.advance() and together.begun == [(1, 2, 3)]
    together.stores.hold(None, 1)
    together.cuda.current.append(lambda: together.gpu.clear())
    together.cuda.run()
    assert together.slots == {ticket: f"{ticket} of {ticket}" for ticket in (1, 2, 3)}


def test_all_of_them_fail(together: Together) -> None:
    together.fails = True
    for ticket in (1, 2):
        together.store(ticket, [ticket], [ticket])
    together.stores.drain()
    assert together.stores.poll() == 2
    assert together.stores.failed == dict.fromkeys((1, 2), (RAISED, "no such slot"))


def test_two_copies_to_one_slot_keep_their_order(together: Together) -> None:
    """On a rank that is behind: the one that reports had done the first when it was planned."""
    together.store(1, [1], [7])
    together.store(2, [2], [7])
    together.stores.drain()
    assert together.begun == [(7,), (7,)] and together.slots == {7: "2 of 2"}


def test_a_copy_is_not_enqueued_before_what_it_goes_behind(together: Together) -> None:
    """Slot 1 is stored, loaded and stored again, on a rank that has done none of it yet."""
    found: list[Any] = []

    def load(streams: Any) -> Iterator[int]:
        streams.bus.append(lambda: found.append(together.slots[1]))
        streams.blocks.wait_stream(streams.bus)
        yield 0

    together.store(1, [1], [1])
    together.loads.submit(1, load, [(together.stores, 1)])
    together.store(2, [2], [2], behind=1)
    together.loads.flush(1)
    together.stores.drain()
    assert together.begun == [(1,), (2,)] and found == ["1 of 1"]


def test_a_copy_that_expires_does_not_take_others_along(together: Together) -> None:
    for ticket in (1, 2):
        together.store(ticket, [ticket], [ticket])
    assert together.stores.expire(1, "late")
    together.stores.drain()
    assert set(together.stores.failed) == {1} and together.slots == {2: "2 of 2"}
    assert together.stores.few


def test_they_wait_for_every_stream_that_computed_their_blocks(together: Together) -> None:
    for ticket in (1, 2):
        with together.cuda.on(together.cuda.new_stream()):
            together.store(ticket, [ticket], [ticket])
    together.stores.drain()
    assert together.begun == [(1, 2)]
    assert together.slots == {1: "1 of 1", 2: "2 of 2"}


def test_a_copy_that_cannot_be_taken_along_is_made_by_itself(together: Together) -> None:
    """Its ticket would pass for done otherwise, because later ones are."""
    together.store(1, [1], [1])
    together.store(2, [2], [2])
    with mock.patch.object(BlockCopy, "join", side_effect=MemoryError("no room")):
        together.stores.advance()
    together.store(3, [3], [3])
    together.stores.drain()
    assert together.stores.poll() == 3
    assert together.stores.failed == {1: (RAISED, "no room")}
    assert together.slots == {2: "2 of 2", 3: "3 of 3"}
