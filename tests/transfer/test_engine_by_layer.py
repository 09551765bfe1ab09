"""A forward pass that waits for a load group by group: for what, and for no more."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from transfer.fake_cuda import FakeCuda
from transfer.test_engine import Batch, step_plan

from kvoffload_patch.links import GPU, LOAD
from kvoffload_patch.plan import TransferPlan
from kvoffload_patch.transfer.backends.base import Slices, Streams
from kvoffload_patch.transfer.engine import CopyEngine
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.queue import CopyQueue


def reading(*loads: int, wait: int = 0, read: Sequence[int] = (), blocks: int = 2) -> TransferPlan:
    """The plan of a step that reads the loads ``read``, of ``blocks`` each."""
    moved = [[ticket] * blocks for ticket in loads]
    batches = [Batch(ticket, ids, ids) for ticket, ids in zip(loads, moved)]
    return step_plan(batches, wait_load=wait, promised=tuple((LOAD, ticket) for ticket in read))


class Rank:
    """An engine on a `FakeCuda`; its loads note the block and the group that they have brought."""

    name = "groups"
    groups = ((0, 1), (1, 2))

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.log: list[Any] = []
        self.fails_in = 3
        self.engine: Any = CopyEngine(BlockLayout([torch.zeros(4, 3)], 4), self)
        lock = threading.RLock()
        for link, copies in self.engine._links.items():
            copies.queue = CopyQueue(cuda, lock, link[1] != GPU, slices_ahead=9)
        self.engine._device = cuda

    def load(self, ids: Any, slots: Any, streams: Streams | None = None, _: bool = False) -> Slices:
        return self._bring(ids, streams)

    def store(self, ids: Any, slots: Any, streams: Streams | None = None) -> Slices:
        return self._bring((), streams)

    def _bring(self, ids: Any, streams: Streams | None) -> Iterator[int]:
        assert streams is not None
        for group in range(len(self.groups)):
            if group == self.fails_in:
                raise OSError("as the test asked")
            for block in ids:
                streams.blocks.append(partial(self.log.append, (block, group)))
            yield group + 1

    def compute(self, name: str) -> None:
        self.cuda.current.append(partial(self.log.append, name))

    def before(self, name: str) -> list[Any]:
        """What is there when compute comes to it, if it comes as early as it can."""
        compute = self.cuda.current
        while name not in self.log:
            if compute.can_go_on():
                compute.go_on()
            else:
                assert any(stream.can_go_on() for stream in self.cuda.streams)
                next(stream for stream in self.cuda.streams if stream.can_go_on()).go_on()
        there = self.log[: self.log.index(name)]
        return [entry for entry in dict.fromkeys(there) if not isinstance(entry, str)]


@pytest.fixture(params=range(2))
def rank(request: Any) -> Iterator[Rank]:
    with FakeCuda(request.param) as cuda:
        yield Rank(cuda)


def test_each_layer_waits_for_its_group_and_for_no_more(rank: Rank) -> None:
    assert rank.engine.begin_step(reading(1, wait=1, read=[1]), True)
    rank.compute("inputs")
    for group in (0, 1):
        rank.engine.wait_group(group)
        rank.compute(f"layer {group}")
    rank.engine.wait_all_groups()
    rank.compute("sampling")
    assert rank.before("inputs") == []
    assert rank.before("layer 0") == [(1, 0)]
    assert rank.before("layer 1") == rank.before("sampling") == [(1, 0), (1, 1)]


def test_a_stream_waits_once_for_the_group_of_several_layers(rank: Rank) -> None:
    compute, other = rank.cuda.current, rank.cuda.new_stream()
    for load in (1, 2):  # of two steps
        assert rank.engine.begin_step(reading(load, wait=load, read=[load]), True)
        before = len(compute.work)
        for group in (0, 0, 1, 1):
            rank.engine.wait_group(group)
        assert len(compute.work) == before + 2
        with rank.cuda.on(other):
            rank.engine.wait_group(0)
            rank.engine.wait_group(0)
        assert len(other.work) == load, "what another stream waited for says nothing"
        rank.engine.wait_all_groups()
        rank.engine.end_step()


def test_a_load_of_an_earlier_step_comes_by_layer_as_well(rank: Rank) -> None:
    assert not rank.engine.begin_step(reading(1), True)
    assert rank.engine.begin_step(reading(wait=1, read=[1]), True)
    rank.engine.wait_group(0)
    rank.compute("layer 0")
    assert rank.before("layer 0") == [(1, 0)]


def test_one_that_nobody_reads_is_waited_for_before_anything_is_computed(rank: Rank) -> None:
    """A layer writes its KV before it waits: what is still to come would replace it."""
    assert not rank.engine.begin_step(reading(1, wait=1), True)
    rank.engine.wait_group(0)
    rank.compute("layer 0")
    assert rank.before("layer 0") == [(1, 0), (1, 1)]


@pytest.mark.parametrize("blocks", [1, 2])
def test_the_last_block_of_a_prompt_is_there_before_a_layer_writes_to_it(
    rank: Rank, blocks: int
) -> None:
    """The step that loads it computes the last token of it; such a load has no other block."""
    by_layer = rank.engine.begin_step(reading(1, 2, wait=2, read=[1, 2], blocks=blocks), True)
    assert by_layer == (blocks > 1)
    rank.compute("layer 0 writes")
    assert ((2, 0) in rank.before("layer 0 writes")) == (blocks == 1)


def test_those_before_the_last_one_are_waited_for_as_a_whole(rank: Rank) -> None:
    assert rank.engine.begin_step(reading(1, 2, wait=2, read=[1, 2]), True)
    rank.compute("inputs")
    assert rank.before("inputs") == [(1, 0), (1, 1)]


def test_the_end_of_the_forward_pass_waits_for_what_no_layer_did(rank: Rank) -> None:
    assert rank.engine.begin_step(reading(1, wait=1, read=[1]), True)
    rank.engine.wait_all_groups()
    rank.compute("sampling")
    assert rank.before("sampling") == [(1, 0), (1, 1)]


def test_a_forward_pass_that_was_given_up_is_made_up_for(rank: Rank) -> None:
    assert rank.engine.begin_step(reading(1, wait=1, read=[1]), True)
    assert not rank.engine.begin_step(None, True)
    rank.compute("the next one")
    assert rank.before("the next one") == [(1, 0), (1, 1)]


def test_the_step_behind_one_by_layer_waits_for_its_own_load(rank: Rank) -> None:
    assert rank.engine.begin_step(reading(1, wait=1, read=[1]), True)
    rank.engine.wait_all_groups()
    assert not rank.engine.begin_step(reading(2, wait=2), True)
    rank.compute("the next one")
    assert rank.before("the next one")[2:] == [(2, 0), (2, 1)]


def test_a_load_that_is_done_is_not_waited_for(rank: Rank) -> None:
    rank.engine.begin_step(reading(1), True)
    rank.engine.drain()
    assert not rank.engine.begin_step(reading(wait=1, read=[1]), True)


@pytest.mark.parametrize("fails_in", [0, 1])
def test_a_load_that_fails_half_way_is_waited_for_as_a_whole_and_known(
    rank: Rank, fails_in: int
) -> None:
    rank.fails_in = fails_in
    assert not rank.engine.begin_step(reading(1, wait=1, read=[1]), True)
    assert rank.engine.failed(((LOAD, 1),))
    rank.compute("inputs")
    assert rank.before("inputs") == [(1, 0)] * fails_in


def test_without_the_gate_a_step_waits_for_all_of_it(rank: Rank) -> None:
    assert not rank.engine.begin_step(reading(1, wait=1, read=[1]))
    rank.compute("inputs")
    assert rank.before("inputs") == [(1, 0), (1, 1)]
