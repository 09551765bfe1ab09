"""`SlotMemory`: slots as addresses, and batches of them cut into slices and runs."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
import torch

from kvoffload_patch.transfer.backends.slots import Part, Run, SlotMemory, in_slot_order

Runs = list[tuple[int, int, int]]


def memory(num_slots: int, per_piece: int = 0, pad: int = 0) -> SlotMemory:
    raw = torch.zeros(num_slots, 4 + pad, dtype=torch.uint8)
    return SlotMemory(raw[:, :4], per_piece)


def parts(
    slots: list[int], chunk: int, num_slots: int = 10, per_piece: int = 0, piece: int = 0
) -> list[Part]:
    ids = np.array(slots, dtype=np.int64)
    found = list(memory(num_slots, per_piece).parts(ids, chunk, piece))
    for part in found:
        for column in part[2:5]:
            assert (column.dtype, column.shape) == (np.int64, part.size.shape)
    return found


def one_by_one(
    slots: list[int], chunk: int, per_piece: int, piece: int
) -> list[tuple[int, int, Runs]]:
    """The same in plain Python: first, number of slots, and runs of each slice."""
    found = []
    for first in range(0, len(slots), chunk):
        runs: list[list[int]] = []
        for at, slot in enumerate(slots[first : first + chunk]):
            is_next = bool(runs) and slot == slots[first + at - 1] + 1
            if piece and at % piece == 0:
                is_next = False
            if is_next and not (per_piece and slot % per_piece == 0):
                runs[-1][2] += 1
            else:
                runs.append([at, slot, 1])
        count = min(chunk, len(slots) - first)
        found.append((first, count, [(at, slot, size) for at, slot, size in runs]))
    return found


@pytest.mark.parametrize(
    ("per_piece", "slots", "runs"),
    [
        (0, [3], [(0, 3, 1)]),
        (0, [4, 5, 6, 9, 8, 2, 3], [(0, 4, 3), (3, 9, 1), (4, 8, 1), (5, 2, 2)]),
        (5, [4, 5, 6, 9, 8, 2, 3], [(0, 4, 1), (1, 5, 2), (3, 9, 1), (4, 8, 1), (5, 2, 2)]),
        (2, [1, 2, 3, 4, 5], [(0, 1, 1), (1, 2, 2), (3, 4, 2)]),
        (1, [1, 2, 3], [(0, 1, 1), (1, 2, 1), (2, 3, 1)]),
        (3, [0, 1, 2, 3], [(0, 0, 3), (3, 3, 1)]),
    ],
)
def test_runs_are_neighbours_of_one_piece(per_piece: int, slots: list[int], runs: Runs) -> None:
    (part,) = parts(slots, 64, per_piece=per_piece)
    assert list(part.runs()) == [Run(*run) for run in runs]


@pytest.mark.parametrize("chunk", [1, 7])
def test_an_empty_batch_has_no_parts(chunk: int) -> None:
    assert parts([], chunk) == []


@pytest.mark.parametrize("seed", range(400))
def test_parts_are_those_that_one_finds_slot_by_slot(seed: int) -> None:
    rng = random.Random(seed)
    num_slots = rng.choice([1, 2, 9, 40, 300])
    chunk, per_piece = rng.choice([1, 2, 3, 8, 64, 1000]), rng.choice([0, 1, 2, 3, 7, 64])
    piece = rng.choice([0, 1, 2, 3, 8])
    slots: list[int] = []
    for _ in range(rng.choice([1, 2, 5, 20])):  # neighbours, and jumps between them
        begin = rng.randrange(num_slots)
        slots += range(begin, min(num_slots, begin + rng.choice([1, 1, 2, 5, 100])))
    if rng.random() < 0.5:
        slots = sorted(set(slots))
    elif rng.random() < 0.3:
        slots.reverse()
    found = parts(slots, chunk, num_slots, per_piece, piece)
    as_plain = [(p.first, p.num_slots, [tuple(run) for run in p.runs()]) for p in found]
    assert as_plain == one_by_one(slots, chunk, per_piece, piece)
    again = []
    for part in found:
        assert part.first == len(again)
        assert part.num_slots <= chunk
        assert part.slots().tolist() == slots[part.first : part.first + part.num_slots]
        for run in part.runs():
            assert part.first + run.at == len(again)
            again += range(run.slot, run.slot + run.size)
            last = run.slot + run.size - 1
            assert per_piece == 0 or run.slot // per_piece == last // per_piece
        of_pieces = [[*part.runs()][runs] for runs in part.pieces(piece or chunk)]
        assert [run for runs in of_pieces for run in runs] == [*part.runs()]
        if piece:
            sizes = [sum(run.size for run in runs) for runs in of_pieces]
            left = part.num_slots % piece
            assert sizes == [piece] * (part.num_slots // piece) + ([left] if left else [])
        assert len(again) == part.first + part.num_slots, "a run goes on in the next slice"
    assert again == slots


def test_a_slot_more_costs_nothing_in_python() -> None:
    """Tens of thousands of slots, none a neighbour: the copy thread shares Python with the step."""

    def instructions(count: int) -> int:
        slots, ids = memory(2 * count), list(range(0, 2 * count, 2))
        seen, before = 0, sys.gettrace()

        def note(frame: Any, event: str, arg: object) -> Any:
            nonlocal seen
            frame.f_trace_opcodes = True
            seen += 1
            return note

        sys.settrace(note)
        try:
            blocks, in_order = in_slot_order(ids, ids[::-1])
            found = list(slots.parts(in_order, count // 4))
        finally:
            sys.settrace(before)
        assert [len(part.size) for part in found] == [count // 4] * 4
        assert len(blocks) == count
        return seen

    instructions(8)  # whatever is done once
    assert 0 < instructions(8) == instructions(40_000)


def test_slots_lie_a_pitch_apart() -> None:
    slots = memory(5, pad=3)
    assert slots.pitch == 7
    pointers = [slots.slots[i].data_ptr() for i in range(5)]
    assert [slots.address(i) for i in range(5)] == pointers
    assert slots.address(np.arange(5)).tolist() == pointers
    assert slots.flat.numel() == 35
    assert slots.flat.data_ptr() == slots.slots.data_ptr()
    span = slots.span(Run(9, 2, 3))
    assert (span.data_ptr(), span.numel()) == (slots.address(2), 21)


@pytest.mark.parametrize(
    ("blocks", "slots", "wanted"),
    [
        ([7, 8, 9], [1, 3, 4], ([7, 8, 9], [1, 3, 4])),
        ([7, 8, 9, 6], [4, 1, 3, 0], ([6, 8, 9, 7], [0, 1, 3, 4])),
        ([7, 8, 9], [1, 3, 2], ([7, 9, 8], [1, 2, 3])),
        ([], [], ([], [])),
    ],
)
def test_pairs_keep_together_when_they_are_put_in_order(
    blocks: list[int], slots: list[int], wanted: tuple[list[int], list[int]]
) -> None:
    found = in_slot_order(blocks, slots)
    assert [ids.dtype for ids in found] == [np.int64] * 2
    assert (found[0].tolist(), found[1].tolist()) == wanted
