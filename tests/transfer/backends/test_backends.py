"""Backends move the bytes of the blocks they are given, and no other byte on either side."""

from __future__ import annotations

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transfer.allocations import NoAllocations, taken_on_the_gpu
from transfer.fake_cuda import FakeCuda, FakeStream
from transfer.layouts import LAYOUTS, needs_gpu
from transfer.opened import NUM_SLOTS, WAYS, Open, Opened, round_trip

from kvoffload_patch.transfer.backends.base import Slices, copy_now

every_way = pytest.mark.parametrize(("name", "device"), WAYS)


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


@every_way
def test_a_block_that_is_larger_than_a_slice_is_one(opened: Open, name: str, device: str) -> None:
    setup = opened("kv_outermost", name, device, chunk=0, per_piece=5, ready=3)
    round_trip(setup, [4, 2, 0, 6], [3, 4, 5, 9], [0, 1, 2, 3])


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


@every_way
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_large_copies_are_cut_into_slices(opened: Open, name: str, device: str, chunk: int) -> None:
    setup = opened("kv_outermost", name, device, chunk=chunk)
    found = setup.store([*range(7)], [*range(7)]), setup.load([*range(7)], [*range(7)])
    if (name, device) == ("torch", "cpu"):
        assert found == (1, 1)
    elif name in ("packed", "direct"):
        assert found == (-(-7 // chunk), -(-7 // chunk))
    elif name != "torch":  # whose staging memory has no pitch on a device
        ready = 2 * chunk + 1  # slices of loads are twice as large
        sizes = [min(ready, 7 - first) for first in range(0, 7, ready)]
        loads = sum(-(-n // 2 // chunk) for n in sizes)
        if name == "groups":  # one of some rows holds more blocks
            ends, room = [*setup.layout.offsets, setup.layout.block_bytes], 2 * chunk
            nbytes = [ends[end] - ends[first] for first, end in setup.backend.groups]
            held = [room * setup.slots.pitch // one for one in nbytes]
            loads = sum(-(-n // most) for most in held for n in sizes)
        assert found == (sum(-(-n // chunk) for n in sizes), loads)


def many_copies(setup: Opened, rng: random.Random) -> None:
    """Of many sizes, most of them under way together."""
    blocks = range(setup.layout.num_blocks)
    for turn in range(12):
        for direction in rng.sample([setup.store, setup.load], 2):
            count = turn if turn < len(blocks) else rng.randint(1, len(blocks))
            direction(rng.sample(blocks, count), rng.sample(range(NUM_SLOTS), count))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("name", ["staged", "packed", "direct"])
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
@pytest.mark.parametrize(
    ("name", "direction", "end"),
    [
        *((name, "store", "bus") for name in ("packed", "direct", "staged", "groups")),
        *((name, "load", "blocks") for name in ("packed", "direct", "staged", "groups")),
        *((name, "store", "blocks") for name in ("packed", "direct")),  # which fill slots there
    ],
)
def test_the_end_of_a_copy_waits_for_its_other_stream(
    opened: Open, name: str, direction: str, end: str
) -> None:
    """Torch's own copies are made at once here: only the streams show what they would be behind."""
    setup = opened("kv_outermost", name, "cpu", chunk=1)
    assert setup.streams is not None
    first, last = setup.streams.bus, setup.streams.blocks
    if end == "bus":
        first, last = last, first
    order: list[str] = []
    first.append(lambda: order.append("what the other stream had before"))
    getattr(setup, direction)([1, 2, 3], [2, 3, 4])
    last.append(lambda: order.append("what comes after it"))
    while last.can_go_on():
        last.go_on()
    assert order == []
    setup.wait()
    assert order == ["what the other stream had before", "what comes after it"]


def test_torchs_own_copies_are_on_the_stream_of_the_blocks(opened: Open) -> None:
    """They go to the current one, so that has to be it for every slice."""
    setup = opened("kv_outermost", "packed", "cpu", chunk=1)
    assert setup.streams is not None and setup.cuda is not None
    cuda, seen = setup.cuda, []

    def current_stream() -> FakeStream:
        seen.append(cuda.current)
        return cuda.current

    cuda.current_stream = current_stream  # type: ignore[method-assign]
    setup.store([1, 2], [3, 4])
    setup.load([1, 2], [3, 4])
    assert seen == [setup.streams.blocks] * 4
    assert cuda.current is not setup.streams.blocks


def test_slots_that_the_device_does_not_know_are_read_when_stores_before_are_done(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch reads them when the copy is enqueued, as it does here."""
    monkeypatch.setattr(FakeCuda, "registers", False)
    setup = opened("kv_outermost", "packed", "cpu")
    assert setup.streams is not None
    slots, rows = setup.slots.slots, setup.layout.rows
    setup.streams.bus.append(lambda: slots[2:5].fill_(9))
    setup.load([1, 2, 3], [2, 3, 4])
    setup.wait()
    assert all(bool((row[1:4] == 9).all()) for row in rows)


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_made_now_begins_and_ends_with_nothing_under_way(fails: bool) -> None:
    """What was computed before may fill its blocks; its memory may be given back behind it."""
    done: list[str] = []

    def copy() -> Slices:
        assert done == ["computed"]
        stream.append(lambda: done.append("copied"))
        yield 0
        if fails:
            raise ValueError("as the test asked")
        return None

    with FakeCuda() as cuda:
        stream = cuda.new_stream()
        cuda.current.append(lambda: done.append("computed"))
        with pytest.raises(ValueError, match="as the test") if fails else nullcontext():
            assert copy_now(torch.device("cpu"), copy) >= 0
        assert done == ["computed", "copied"]
