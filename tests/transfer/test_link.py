"""Links: which of them go behind which, and a third place that needs no further field.

The third place is a made-up disk: a dict of bytes, and a function that copies on each of its two
links. Everything else is the engine, the plans and the queues that GPU and CPU have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transfer.fake_cuda import FakeCuda

from kvoffload_patch.links import CPU, GPU, LOAD, NOT_STORED, RAISED, STORE, Link
from kvoffload_patch.plan import Transfer, TransferPlan
from kvoffload_patch.transfer.backends.base import Slices, Streams
from kvoffload_patch.transfer.engine import CopyEngine
from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.link import Copy, must_follow
from kvoffload_patch.transfer.queue import CopyQueue
from kvoffload_patch.transfer.turns import Turn

DISK = "disk"
READ: Link = (DISK, CPU)
WRITE: Link = (CPU, DISK)
LINKS = [LOAD, STORE, READ, WRITE]
Ids = Sequence[int]


@pytest.mark.parametrize(
    ("link", "behind"),
    [
        (LOAD, {STORE, READ}),  # they fill what it reads
        (STORE, {LOAD, READ, WRITE}),  # they read or fill what it overwrites
        (READ, {LOAD, STORE, WRITE}),  # and what it reads, WRITE has filled
        (WRITE, {STORE, READ}),
    ],
)
def test_a_copy_goes_behind_what_has_filled_or_used_its_blocks(link: Link, behind: set) -> None:
    assert {other for other in LINKS if must_follow(link, other)} == behind


def test_with_two_places_each_direction_goes_behind_the_other() -> None:
    assert must_follow(LOAD, STORE) and must_follow(STORE, LOAD)
    assert not (must_follow(LOAD, LOAD) or must_follow(STORE, STORE))


class Rank:
    """GPU blocks, CPU slots and a disk, a word in each of their blocks; and the copies between."""

    name = "words"
    groups = ()

    def __init__(self, cuda: FakeCuda, **how: Any) -> None:
        self.cuda = cuda
        self.words: dict[str, dict[int, str]] = {GPU: {}, CPU: {}, DISK: {}}
        self.fails: set[Link] = set()
        more: dict[Link, Copy] = {READ: self._on(READ), WRITE: self._on(WRITE)}
        layout = BlockLayout([torch.zeros(4, 3)], 4)
        self.engine: Any = CopyEngine(layout, self, more=more, **how)
        lock = threading.RLock()
        for link, copies in self.engine._links.items():
            copies.queue = CopyQueue(cuda, lock, link[1] != GPU, slices_ahead=4)

    def load(
        self, gpu_block_ids: Ids, cpu_slots: Ids, streams: Any = None, compared: bool = False
    ) -> Slices:
        return self._on(LOAD)(cpu_slots, gpu_block_ids, streams, compared)

    def store(self, gpu_block_ids: Ids, cpu_slots: Ids, streams: Any = None) -> Slices:
        return self._on(STORE)(gpu_block_ids, cpu_slots, streams, False)

    def _on(self, link: Link) -> Copy:
        source, target = (self.words[place] for place in link)

        def copy(
            source_ids: Ids, target_ids: Ids, streams: Streams | None, _: bool
        ) -> Iterator[int]:
            assert streams is not None
            stream = streams.blocks if link[1] == GPU else streams.bus
            if link[0] == GPU:
                stream.wait_stream(streams.blocks)
            if link[1] == GPU:
                stream.wait_stream(streams.bus)
            for one, other in zip(source_ids, target_ids):
                stream.append(lambda o=one, t=other: target.update({t: source.get(o, "nothing")}))
                yield 0
            if link in self.fails:
                raise OSError("no such file")

        return copy

    def step(self, plan: TransferPlan, compute: Callable[[], object] = lambda: None) -> None:
        self.engine.begin_step(plan)
        self.cuda.current.append(compute)
        self.engine.end_step()

    def drain(self) -> None:
        self.engine.drain()
        self.cuda.run()


@pytest.fixture(params=range(8))
def rank(request: Any) -> Iterator[Rank]:
    with FakeCuda(request.param) as cuda:
        yield Rank(cuda)


def test_a_block_goes_to_the_disk_and_back_by_plans(rank: Rank) -> None:
    """As late as the plans allow: each copy is enqueued only because a later one goes behind it."""
    rank.words[GPU][1] = "block"
    rank.step(TransferPlan(after=(Transfer(1, *STORE, (1,), (5,)),)))
    rank.step(TransferPlan(before=(Transfer(1, *WRITE, (5,), (9,)),), done=((STORE, 1),)))
    # The slot and the GPU block are used for another one meanwhile.
    rank.step(
        TransferPlan(
            after=(Transfer(2, *STORE, (1,), (5,)),),
            waits=((STORE, 1),),
            done=((STORE, 1), (WRITE, 1)),
        ),
        compute=lambda: rank.words[GPU].update({1: "another"}),
    )
    rank.step(TransferPlan(before=(Transfer(1, *READ, (9,), (6,)),), done=((WRITE, 1),)))
    seen: list[Any] = []
    rank.step(
        TransferPlan(
            before=(Transfer(1, *LOAD, (6,), (2,)),), waits=((LOAD, 1),), done=((READ, 1),)
        ),
        compute=lambda: seen.append(rank.words[GPU].get(2)),
    )
    rank.drain()
    assert seen == ["block"]
    assert (rank.words[CPU][5], rank.words[DISK][9]) == ("another", "block")
    assert dict(rank.engine.poll().done) == {LOAD: 1, STORE: 2, READ: 1, WRITE: 1}


def test_what_failed_to_come_from_the_disk_is_not_loaded(rank: Rank) -> None:
    rank.fails.add(READ)
    rank.step(TransferPlan(before=(Transfer(1, *READ, (9,), (6,)),)))
    rank.step(TransferPlan(before=(Transfer(1, *LOAD, (6,), (2,)),), done=((READ, 1),)))
    rank.drain()
    assert rank.engine.poll().failed == ((LOAD, 1, NOT_STORED), (READ, 1, RAISED))
    _, _, reason = rank.engine.failed(((LOAD, 1),))
    assert "copy of some of these blocks to the cpu has failed" in reason
    rank.fails.clear()
    plan = TransferPlan(before=(Transfer(2, *READ, (9,), (6,)),), done=((READ, 1), (LOAD, 1)))
    rank.step(plan)
    rank.step(TransferPlan(before=(Transfer(2, *LOAD, (6,), (2,)),), done=((READ, 2), (LOAD, 1))))
    rank.drain()
    assert rank.engine.poll().failed == ()


def test_a_ticket_of_a_further_link_that_is_missing_is_an_error(rank: Rank) -> None:
    with pytest.raises(TransferError, match="expected ticket 1 from disk to cpu, found 2:"):
        rank.step(TransferPlan(before=(Transfer(2, *READ, (9,), (6,)),)))


def test_a_transfer_on_a_link_that_nothing_copies_on_is_refused(rank: Rank) -> None:
    with pytest.raises(TransferError, match="found one from disk to gpu"):
        rank.step(TransferPlan(before=(Transfer(1, DISK, GPU, (9,), (2,)),)))


def test_a_copy_out_of_the_gpu_before_a_step_goes_behind_those_of_the_step_before(
    rank: Rank,
) -> None:
    rank.words[GPU].update({1: "first", 2: "second"})
    rank.engine.begin_step(TransferPlan(after=(Transfer(1, *STORE, (1,), (5,)),)))
    rank.engine.end_step()
    rank.step(TransferPlan(before=(Transfer(2, *STORE, (2,), (5,)),)))
    rank.drain()
    assert rank.words[CPU] == {5: "second"}
    assert rank.engine.poll().done_on(STORE) == 2


def test_ranks_with_slots_in_common_store_a_part_each_and_load_all() -> None:
    """A rank may have none of a store. Slots alone are waited for, until they are usable."""

    def wait_ready(slots: int) -> None:
        assert slots <= 8, "so many are to come"

    held = {11: "head", 12: "middle", 13: "tail"}
    store = TransferPlan(after=(Transfer(1, *STORE, (11, 12), (4, 7)),))
    more = TransferPlan(after=(Transfer(2, *STORE, (13,), (5,)),))
    load = TransferPlan((Transfer(1, *LOAD, (4, 7, 5), (21, 22, 23)),), done=((STORE, 2),))
    with FakeCuda() as cuda:
        ranks = [Rank(cuda, turn=Turn(at, 2), wait_ready=wait_ready) for at in range(2)]
        for rank in ranks:
            rank.words[GPU].update(held)
            for plan in store, more:
                rank.step(plan)
            rank.drain()
        assert [rank.words[CPU] for rank in ranks] == [{4: "head"}, {7: "middle", 5: "tail"}]
        for rank, other in zip(ranks, reversed(ranks)):
            rank.words[CPU].update(other.words[CPU])
        for rank in ranks:
            rank.step(load)
            rank.drain()
            assert rank.engine.poll().failed == ()
            assert [rank.words[GPU].get(block) for block in (21, 22, 23)] == [*held.values()]
