"""Backends move the bytes of the blocks they are given, and no other byte on either side."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transfer.allocations import NoAllocations, taken_on_the_gpu
from transfer.layouts import LAYOUTS, build, equal, needs_gpu
from transfer.opened import NUM_SLOTS, POISON, WAYS, Opened

from kvoffload_patch.transfer.errors import TransferError

Open = Callable[..., Opened]
every_way = pytest.mark.parametrize(("name", "device"), WAYS)


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens a backend; closed when the test is over."""
    made: list[Opened] = []

    def open_one(
        layout: str, name: str, device: str, dtype: Any = torch.bfloat16, **how: Any
    ) -> Opened:
        made.append(Opened(build(layout, dtype, device=device), name, device, **how))
        return made[-1]

    yield open_one
    for setup in made:
        setup.close()


def store(setup: Opened, source: list[int], slots: list[int]) -> None:
    """Store blocks, and compare all memory there is."""
    case, flat = setup.case, setup.slots.flat
    before = [raw.clone() for raw in case.storages()]
    slots_before = flat.clone()
    setup.store(source, slots)
    setup.wait_for_end("store")
    assert equal(case.storages(), before), "a store changed KV tensors"
    for slot in range(NUM_SLOTS):
        if slot in slots:
            block = source[slots.index(slot)]
            assert torch.equal(setup.slots.slots[slot], setup.wanted(block))
        else:
            span = slice(slot * setup.slots.pitch, (slot + 1) * setup.slots.pitch)
            assert torch.equal(flat[span], slots_before[span]), "a store changed another slot"


def load(setup: Opened, target: list[int], slots: list[int]) -> None:
    """Load slots into blocks, and compare all memory beside them."""
    case = setup.case
    setup.poison(target)
    filled = setup.slots.flat.clone()
    rest = case.untouched(target)
    setup.load(target, slots)
    setup.wait_for_end("load")
    assert torch.equal(setup.slots.flat, filled), "a load changed slots"
    assert equal(case.untouched(target), rest), "a load changed bytes beside its blocks"


def round_trip(setup: Opened, source: list[int], slots: list[int], target: list[int]) -> None:
    """Store blocks and load them into other blocks."""
    stored = {block: setup.case.content(block) for block in source}
    store(setup, source, slots)
    setup.poison(source)
    load(setup, target, slots)
    assert [setup.case.content(b) for b in target] == [stored[b] for b in source]


@every_way
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_come_back_as_they_were_and_nothing_else_changes(
    opened: Open, layout: str, dtype: torch.dtype, name: str, device: str
) -> None:
    setup = opened(layout, name, device, dtype, pad=3, per_piece=3)
    round_trip(setup, [5, 0, 3], [8, 2, 3], [1, 6, 2])


@every_way
@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize(
    ("source", "slots", "target"),
    [
        ([], [], []),
        ([6], [11], [6]),
        ([0], [0], [5]),
        ([0, 1, 2], [4, 5, 6], [4, 5, 6]),
        ([0, 1, 2], [6, 5, 4], [2, 1, 0]),
        ([4, 2, 0, 6, 1, 3, 5], [0, 1, 2, 9, 10, 5, 6], [0, 1, 2, 3, 4, 5, 6]),
        ([0, 1, 2, 3, 4, 5, 6], [3, 4, 5, 6, 7, 8, 9], [6, 5, 4, 3, 2, 1, 0]),
    ],
)
def test_any_order_and_number_of_blocks(
    opened: Open, source: list[int], slots: list[int], target: list[int], chunk: int,
    name: str, device: str,
) -> None:  # fmt: skip
    for per_piece, pad in [(0, 0), (5, 1)]:
        setup = opened("kv_outermost", name, device, chunk=chunk, per_piece=per_piece, pad=pad)
        round_trip(setup, source, slots, target)


def pick(rng: random.Random, count: int) -> list[int]:
    """Slots in random runs and order."""
    if rng.random() < 0.3:
        begin = rng.randint(0, NUM_SLOTS - count)
        return list(range(begin, begin + count))
    slots = rng.sample(range(NUM_SLOTS), count)
    return sorted(slots) if rng.random() < 0.5 else slots


@every_way
@pytest.mark.parametrize("seed", range(30))
def test_copies_enqueued_one_after_the_other(
    opened: Open, name: str, device: str, seed: int
) -> None:
    """Staging memory is used again before earlier copies are done."""
    rng = random.Random(seed)
    setup = opened(
        rng.choice(["kv_outermost", "different_dtypes", "layers_outermost_in_one_allocation"]),
        name, device, chunk=rng.choice([1, 1, 2, 3]), pad=rng.choice([0, 5]),
        per_piece=rng.choice([0, 1, 4, 5]), seed=seed,
    )  # fmt: skip
    blocks = list(range(setup.layout.num_blocks))
    holds = {}
    for _ in range(3):
        source = rng.sample(blocks, rng.randint(1, len(blocks)))
        slots = pick(rng, len(source))
        setup.store(source, slots)
        holds.update({slot: setup.wanted(b) for b, slot in zip(source, slots)})
    setup.wait()
    for slot, wanted in holds.items():
        assert torch.equal(setup.slots.slots[slot], wanted)
    wanted_in = {}
    for _ in range(3):
        slots = rng.sample(sorted(holds), rng.randint(1, min(len(holds), len(blocks))))
        target = rng.sample(blocks, len(slots))
        setup.load(target, slots)
        wanted_in.update({b: holds[slot] for b, slot in zip(target, slots)})
    setup.wait()
    for block, wanted in wanted_in.items():
        assert torch.equal(setup.wanted(block), wanted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
@pytest.mark.parametrize("seed", range(8))
def test_copies_go_behind_what_their_streams_have_been_given(opened: Open, seed: int) -> None:
    """Slots behind the stream of the bus, blocks behind that of the blocks."""
    setup = opened("kv_outermost", "staged", "cpu", chunk=1, seed=seed)
    assert setup.streams is not None
    slots, rows, seen = setup.slots.slots, setup.layout.rows, []
    bus, blocks = setup.streams.bus, setup.streams.blocks
    bus.append(lambda: seen.append(slots[2:5].clone()))
    blocks.append(lambda: [row[1:4].fill_(7) for row in rows])
    setup.store([1, 2, 3], [2, 3, 4])
    setup.wait()
    assert bool((seen.pop() == POISON).all())
    assert bool((slots[2:5] == 7).all())
    bus.append(lambda: slots[2:5].fill_(9))
    blocks.append(lambda: seen.extend(row[1:4].clone() for row in rows))
    setup.load([1, 2, 3], [2, 3, 4])
    setup.wait()
    assert all(bool((row == 7).all()) for row in seen)
    assert all(bool((row[1:4] == 9).all()) for row in rows)


@every_way
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_large_copies_are_cut_into_slices(opened: Open, name: str, device: str, chunk: int) -> None:
    setup = opened("kv_outermost", name, device, chunk=chunk)
    slices = -(-7 // chunk)
    found = setup.store([*range(7)], [*range(7)]), setup.load([*range(7)], [*range(7)])
    if (name, device) == ("torch", "cpu"):
        assert found == (0, 0)  # at once
    elif name != "torch":  # whose staging memory has no pitch on a device
        assert found == (slices, slices)


@pytest.mark.parametrize("jobs", [[7], [1, 1, 3]])
@pytest.mark.parametrize("what", ["store", "load"])
def test_each_slice_is_on_the_other_stream_of_the_bus_behind_the_one_before(
    opened: Open, what: str, jobs: list[int]
) -> None:
    """So that the copy engine lets others' copies in between: it goes on with a stream that can."""
    setup = opened("kv_outermost", "staged", "cpu", chunk=1)
    assert setup.streams is not None and setup.cuda is not None
    seen: list[int] = []
    made: list[int] = []  # in the order in which the device has done them
    streams = setup.cuda.streams
    enqueue = setup.driver._enqueue

    def noted(target: int, source: int, nbytes: int, stream: int) -> None:
        seen.append(stream)
        enqueue(target, source, nbytes, stream)
        streams[stream - 1].append(partial(made.append, len(seen)))

    setup.driver._enqueue = noted
    first = slices = 0
    for count in jobs:
        numbers = [*range(first, first + count)]
        first += count
        slices += getattr(setup, what)(numbers, numbers)
    turns = [stream for stream, _ in itertools.groupby(seen)]
    assert len(turns) == slices >= 5 and len(set(seen)) == 2
    assert setup.streams.bus.number in seen, "the end of a copy is behind it"
    assert setup.streams.blocks.number not in seen
    setup.wait()
    assert made == [*range(1, len(seen) + 1)]


def many_copies(setup: Opened, rng: random.Random) -> None:
    """Of many sizes, most of them under way together."""
    blocks = range(setup.layout.num_blocks)
    for turn in range(12):
        for direction in rng.sample([setup.store, setup.load], 2):
            count = turn if turn < len(blocks) else rng.randint(1, len(blocks))
            direction(rng.sample(blocks, count), rng.sample(range(NUM_SLOTS), count))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("name", ["staged", "packed"])
def test_no_copy_takes_memory(opened: Open, name: str, chunk: int) -> None:
    """Or a load that is promised would fail because the device is full."""
    setup = opened("different_dtypes", name, "cpu", chunk=chunk, pad=3, per_piece=5)
    refused = NoAllocations(setup.cuda)
    with refused, pytest.raises(AssertionError, match=r"aten.empty\S* takes memory"):
        torch.empty(3)
    with refused, pytest.raises(AssertionError, match=r"aten.index.Tensor takes memory"):
        setup.slots.slots[torch.from_numpy(np.array([1]))]
    setup.enqueue = refused.guard(setup.enqueue)  # type: ignore[method-assign]
    many_copies(setup, random.Random(chunk))
    setup.wait()
    round_trip(setup, [5, 0, 3], [8, 2, 3], [1, 6, 2])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("name", ["staged", "singles", "torch"])
def test_no_copy_takes_memory_of_the_gpu(opened: Open, name: str, chunk: int) -> None:
    setup = opened("different_dtypes", name, "cuda", chunk=chunk)
    before = taken_on_the_gpu()
    for seed in range(20):
        many_copies(setup, random.Random(seed))
    setup.wait()
    assert taken_on_the_gpu() == before
    round_trip(setup, [5, 0, 3], [8, 2, 3], [1, 6, 2])
    assert taken_on_the_gpu() != before, "the comparison itself takes some: is it counted?"


@every_way
def test_what_is_stored_again_replaces_what_was_there(opened: Open, name: str, device: str) -> None:
    setup = opened("different_dtypes", name, device)
    wanted = setup.case.content(4)
    setup.store([1, 2], [7, 8])
    setup.store([4], [7])
    setup.wait()
    setup.load([0], [7])
    setup.wait()
    assert setup.case.content(0) == wanted


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
@pytest.mark.parametrize("fail_in", range(6))
@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_refused_copy_is_raised_and_later_ones_are_right(
    opened: Open, direction: str, fail_in: int
) -> None:
    for seed in range(5):
        setup = opened("different_dtypes", "staged", "cpu", chunk=2, seed=seed)
        source, slots = [*range(6)], [0, 2, 4, 6, 8, 10]
        setup.store(source, slots)
        setup.wait()
        setup.driver.fail_in = fail_in
        with pytest.raises(TransferError, match="as the test asked"):
            getattr(setup, direction)(source, slots)
        round_trip(setup, [6, 5, 1], [1, 3, 4], [0, 4, 2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
@pytest.mark.parametrize(
    ("slots", "copies"),
    [([0, 1, 2, 3], 1), ([0, 2, 4, 6], 4), ([0, 1, 4, 6], 3), ([6, 4, 1, 0], 3)],
)
def test_neighbours_are_merged_and_the_rest_goes_to_the_driver_in_one_call(
    opened: Open, slots: list[int], copies: int
) -> None:
    setup = opened("k_and_v_apart", "staged", "cpu", chunk=4)
    setup.store([0, 1, 2, 3], slots)
    setup.load([0, 1, 2, 3], slots)
    assert setup.driver.calls == [copies, copies]
