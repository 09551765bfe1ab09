"""A load that brings other bytes than were stored is found, whatever has changed them."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from transfer.layouts import LAYOUTS, needs_gpu
from transfer.opened import Open, Opened

from kvoffload_patch.transfer.backends import kernels
from kvoffload_patch.transfer.backends.base import copy_now
from kvoffload_patch.transfer.backends.tiles import TileMover
from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.integrity import Checksums, Verdicts, in_words

CPU = torch.device("cpu")
_interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
_gpu = [pytest.mark.gpu, needs_gpu]
# Where checksums are made.
WAYS = [
    ("torch", "cpu"),
    *(pytest.param(n, "cpu", marks=_interpreted) for n in ("staged", "groups")),
    *(pytest.param(n, "cuda", marks=_gpu) for n in ("staged", "groups", "singles")),
]
every_way = pytest.mark.parametrize(("name", "device"), WAYS)
SOURCE, SLOTS, TARGET = [5, 0, 3], [8, 2, 3], [1, 6, 2]


def load(setup: Opened, target: list[int], slots: list[int]) -> str | None:
    """What the verdict of a load says once it is done."""
    setup.load(target, slots)
    assert setup.verdict is not None
    setup.wait()
    return setup.verdict()


def flip(setup: Opened, slot: int, byte: int, bit: int) -> None:
    setup.slots.slots[slot, byte] ^= 1 << bit


@every_way
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_stored_is_right_and_one_flipped_bit_is_not(
    opened: Open, layout: str, name: str, device: str
) -> None:
    setup = opened(layout, name, device, pad=3, per_piece=3, checked=True)
    setup.store(SOURCE, SLOTS)
    setup.wait()
    assert load(setup, TARGET, SLOTS) is None
    rng, nbytes = random.Random(layout), setup.layout.block_bytes
    for byte in {nbytes - 1, rng.randrange(nbytes)}:
        bit = rng.randrange(8)
        flip(setup, 2, byte, bit)
        said = load(setup, TARGET, SLOTS)
        assert said is not None and "expected the checksum that the block in CPU slot 2 " in said
        assert load(setup, [TARGET[0], TARGET[2]], [8, 3]) is None, "those beside it are right"
        flip(setup, 2, byte, bit)
    assert load(setup, TARGET, SLOTS) is None
    assert setup.backend.checksums.mismatches >= 1


@every_way
def test_groups_of_rows_that_come_in_several_slices(opened: Open, name: str, device: str) -> None:
    """The parts of a block's checksum are found again where its next rows come."""
    setup = opened("kv_outermost", name, device, chunk=1, ready=7, checked=True)
    setup.store([*range(7)], [*range(7)])
    setup.wait()
    assert load(setup, [*range(7)], [6, 5, 4, 3, 2, 1, 0]) is None
    flip(setup, 5, setup.layout.block_bytes - 1, 3)
    assert load(setup, [*range(7)], [*range(7)]) is not None


@every_way
def test_every_bit_of_a_block(opened: Open, name: str, device: str) -> None:
    setup = opened("different_dtypes", name, device, torch.uint8, checked=True)
    setup.store([1], [4])
    setup.wait()
    for byte in range(0, setup.layout.block_bytes, 1 if device == "cuda" else 7):
        bit = byte % 8
        flip(setup, 4, byte, bit)
        assert load(setup, [2], [4]) is not None, (byte, bit)
        flip(setup, 4, byte, bit)


@every_way
def test_bytes_of_another_place_or_block_are_found(opened: Open, name: str, device: str) -> None:
    """Whose own checksums are right: words that changed places, and slots that did."""
    setup = opened("blocks_outermost", name, device, checked=True)
    slots = setup.slots.slots
    setup.store([1, 2, 3], [0, 1, 2])
    setup.wait()
    before = slots.clone()
    slots[0, :8], slots[0, 8:16] = before[0, 8:16], before[0, :8]
    slots[1], slots[2] = before[2], before[1]
    assert [load(setup, [4], [slot]) is None for slot in (0, 1, 2)] == [False] * 3
    slots.copy_(before)
    assert load(setup, [4, 5, 6], [0, 1, 2]) is None


@every_way
def test_sign_bits_that_change_together_are_found(opened: Open, name: str, device: str) -> None:
    """In a plain sum two changes of the highest bit of a word cancel each other."""
    setup = opened("blocks_outermost", name, device, torch.float32, checked=True)
    setup.store([1], [0])
    setup.wait()
    flip(setup, 0, 7, 7)
    flip(setup, 0, 15, 7)
    assert load(setup, [4], [0]) is not None


@every_way
def test_a_store_that_never_arrived_is_found(opened: Open, name: str, device: str) -> None:
    """The slot still has what was stored there before, and is whole in itself."""
    setup = opened("kv_outermost", name, device, checked=True)
    setup.store([1], [4])
    setup.wait()
    stale = setup.slots.slots[4].clone()
    setup.store([2], [4])
    setup.wait()
    setup.slots.slots[4] = stale
    assert load(setup, [3], [4]) is not None


@every_way
def test_a_slot_that_nobody_stored_to_is_found(opened: Open, name: str, device: str) -> None:
    setup = opened("kv_outermost", name, device, checked=True)
    assert load(setup, [3], [4]) is not None


@every_way
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_each_load_has_its_own_verdict(opened: Open, chunk: int, name: str, device: str) -> None:
    """Though they are under way together, in slices of several blocks, or in many."""
    setup = opened("different_dtypes", name, device, chunk=chunk, checked=True, pad=5)
    setup.store([*range(7)], [*range(7)])
    setup.wait()
    flip(setup, 3, 1, 1)
    flip(setup, 6, 0, 0)
    verdicts = []
    for slots in ([0, 1, 2], [4, 3], [5, 1], [6, 0, 4], [2]):
        setup.load([*range(len(slots))], slots)
        assert setup.verdict is not None
        verdicts.append(setup.verdict)
    setup.wait()
    said = [verdict() for verdict in verdicts]
    assert [text is None for text in said] == [True, False, True, False, True]
    assert "CPU slot 3 " in str(said[1]) and "CPU slot 6 " in str(said[3])
    assert setup.backend.checksums.mismatches == 2


@every_way
def test_a_block_that_another_rank_has_stored_is_not_compared(
    opened: Open, name: str, device: str
) -> None:
    """Where ranks have slots in common, each has the checksums of what it stored itself."""
    setup = opened("kv_outermost", name, device, checked=True, complete=False)
    setup.store([1], [4])
    setup.wait()
    assert load(setup, [2, 3], [4, 5]) is None, "nothing of slot 5 is known here"
    flip(setup, 4, 0, 0)
    assert "CPU slot 4 " in str(load(setup, [2, 3], [5, 4]))
    assert int((setup.backend.checksums.sums != 0).sum()) == 1


@every_way
def test_a_load_that_is_not_compared_has_no_verdict(opened: Open, name: str, device: str) -> None:
    setup = opened("kv_outermost", name, device, checked=True)
    setup.store(SOURCE, SLOTS)
    setup.wait()
    flip(setup, 2, 0, 0)
    for _ in range(2):
        setup.enqueue(setup.backend.load, TARGET, SLOTS)
        assert setup.verdict is None
    setup.wait()
    assert load(setup, TARGET, SLOTS) is not None, "the next one is"


@every_way
def test_without_checksums_nobody_asks(opened: Open, name: str, device: str) -> None:
    setup = opened("kv_outermost", name, device)
    setup.store([1], [4])
    setup.load([2], [4])
    assert setup.verdict is None
    setup.wait()


def test_what_is_wrong_at_start_is_raised(opened: Open) -> None:
    """The canary, and the copies that are timed."""
    setup = opened("kv_outermost", "torch", "cpu", checked=True)
    copy_now(CPU, lambda: setup.backend.store([1], [4]))
    again = partial(setup.backend.load, [1], [4], compared=True)
    assert copy_now(CPU, again) >= 0
    flip(setup, 4, 0, 0)
    with pytest.raises(TransferError, match="expected the checksum .* CPU slot 4 was stored with"):
        copy_now(CPU, again)


def test_a_load_has_a_place_until_its_verdict_is_asked_for() -> None:
    checksums = Checksums(9, CPU)
    verdicts = Verdicts(checksums, 2)
    (first, ask_first, _), (second, ask_second, _) = verdicts.begin(), verdicts.begin()
    assert first.data_ptr() != second.data_ptr()
    assert {word.data_ptr() % 16 for word in (first, second)} == {first.data_ptr() % 16}
    with pytest.raises(TransferError, match="expected fewer loads under way"):
        verdicts.begin()
    second[0] = 1 + 7
    assert ask_first() is None
    assert "CPU slot 7 " in str(ask_second())
    assert checksums.mismatches == 1
    again, ask, _ = verdicts.begin()
    assert again.data_ptr() == first.data_ptr() and ask() is None


def test_a_load_that_is_given_up_gives_its_place_back() -> None:
    verdicts = Verdicts(Checksums(9, CPU), 1)
    for _ in range(3):
        words, _, give_up = verdicts.begin()
        words[0] = 3
        give_up()
    assert verdicts.begin()[1]() is None, "what an earlier one has found counts no more"


@_interpreted
@pytest.mark.parametrize("fail_in", [0, 1, 3])
def test_loads_that_fail_part_way_leave_no_trace(opened: Open, fail_in: int) -> None:
    for seed in range(2):
        setup = opened("different_dtypes", "staged", "cpu", chunk=2, seed=seed, checked=True)
        source, slots = [*range(6)], [0, 2, 4, 6, 8, 10]
        setup.store(source, slots)
        setup.wait()
        for _ in range(setup.layout.num_blocks + 2):
            setup.driver.fail_in = fail_in
            with pytest.raises(TransferError, match="as the test asked"):
                setup.load(source, slots)
        setup.wait()
        assert load(setup, source, slots) is None


@_interpreted
def test_more_tiles_than_can_be_counted_are_refused(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = opened("different_dtypes", "torch", "cpu").layout
    monkeypatch.setattr("kvoffload_patch.transfer.backends.tiles.COUNT_BITS", 0)
    assert kernels.COUNT_BITS == 16
    with pytest.raises(TransferError, match="expected blocks of fewer than 1 tiles, found 5"):
        TileMover(layout, 1024, [0], Checksums(4, CPU))


def test_words_for_the_log() -> None:
    assert [in_words(False), in_words(True)] == ["", ", checksums of all blocks"]


@_interpreted
@pytest.mark.parametrize("fail_in", range(6))
def test_a_load_that_was_refused_half_way_leaves_no_parts_of_checksums(
    opened: Open, fail_in: int
) -> None:
    """By group, some blocks are not whole then: the next load's would be added to theirs."""
    setup = opened("k_and_v_apart", "groups", "cpu", chunk=1, checked=True)
    setup.store(SOURCE, SLOTS)
    setup.wait()
    setup.driver.fail_in = fail_in
    with pytest.raises(TransferError, match="as the test asked"):
        setup.load(TARGET, SLOTS)
    setup.wait()
    assert load(setup, TARGET, SLOTS) is None
