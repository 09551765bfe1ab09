"""The kernel moves what indexing in torch moves, and no other byte.

On Triton's interpreter where there is no GPU (`conftest.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transfer.layouts import DTYPES, LAYOUTS, SIZES, Case, Sizes, build, equal, needs_gpu

from kvoffload_patch.transfer.backends import tiles
from kvoffload_patch.transfer.backends.tiles import TileMover
from kvoffload_patch.transfer.layout import BlockLayout

DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
    ),
    pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu]),
]
POISON = 0xA5
ENTRIES = 12
NUM_BLOCKS = 13  # divides none of the sizes below


def padded(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


class Flat:
    """Poisoned flat memory of `ENTRIES` entries, with guards, that begins at any alignment."""

    def __init__(self, pitch: int, device: str, shift: int = 0) -> None:
        begin, nbytes = 64 + shift, ENTRIES * pitch
        self.all = torch.full((begin + nbytes + 64,), POISON, dtype=torch.uint8, device=device)
        self.memory = self.all[begin : begin + nbytes]

    def fill(self) -> None:
        random = torch.Generator().manual_seed(3)
        made = torch.randint(0, 256, self.all.shape, dtype=torch.uint8, generator=random)
        self.all.copy_(made)


def reference(
    to_flat: bool, layout: BlockLayout, flat: torch.Tensor, pitch: int,
    blocks: Sequence[int],
) -> None:  # fmt: skip
    """By indexing, row by row."""
    at = 0
    for row in layout.rows:
        for entry, block in enumerate(blocks):
            begin = entry * pitch + at
            if to_flat:
                flat[begin : begin + row.shape[1]] = row[block]
            else:
                row[block] = flat[begin : begin + row.shape[1]]
        at += row.shape[1]


def current(device: str) -> Any:
    """The stream of what this thread computes, on a GPU."""
    return torch.cuda.current_stream() if device == "cuda" else None


def check(
    case: Case, twin: Case, pitch: int, shift: int = 0,
    first: int = 0, count: int = 3,
) -> TileMover:  # fmt: skip
    """Move some blocks both ways, and compare all memory with a twin's."""
    layout, other = case.layout(), twin.layout()
    device = str(layout.device.type)
    flat, wanted = Flat(pitch, device, shift), Flat(pitch, device, shift)
    mover = TileMover(layout, pitch, [flat.memory.data_ptr()])
    blocks = [1, layout.num_blocks - 1, 0, 2, 1, 0][: first + count]
    ids = torch.tensor(blocks).to(device)
    for to_flat in (True, False):
        if not to_flat:
            flat.fill()
            wanted.fill()
        picked = blocks[first:] if to_flat else distinct(blocks[first:])
        mover.move(current(device), to_flat, flat.memory, ids, first, len(picked))
        reference(to_flat, other, wanted.memory, pitch, picked)
        assert torch.equal(flat.all, wanted.all)
        assert equal(case.storages(), twin.storages())
    return mover


def distinct(blocks: list[int]) -> list[int]:
    """The blocks before one that comes again: two entries into one block have no order."""
    upto = next((i for i, block in enumerate(blocks) if block in blocks[:i]), len(blocks))
    return blocks[:upto]


# What a kernel sees of a dtype is the size of its items: each compiled kernel takes a while.
ON_DEVICES = [("cpu", dtype) for dtype in DTYPES] + [
    ("cuda", dtype) for dtype in (torch.uint8, torch.bfloat16, torch.float32)
]
MARKS = dict(zip(("cpu", "cuda"), DEVICES))


@pytest.mark.parametrize(
    ("device", "dtype"),
    [pytest.param(device, d, marks=MARKS[device].marks) for device, d in ON_DEVICES],
    ids=str,
)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name: str, sizes: Sizes, dtype: torch.dtype, device: str) -> None:
    case, twin = (build(name, dtype, sizes, device) for _ in range(2))
    block_bytes = case.layout().block_bytes
    check(case, twin, padded(block_bytes, 64))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("pad", [0, 1, 2, 4, 8, 48])
def test_every_alignment_of_the_flat_memory(pad: int, shift: int, device: str) -> None:
    case, twin = (build("layers_within_blocks", sizes=SIZES[2], device=device) for _ in range(2))
    block_bytes = case.layout().block_bytes
    assert block_bytes % 16 == 0
    mover = check(case, twin, block_bytes + pad, shift)
    # The largest power of two, up to a vector, that divides all of them.
    aligned = (16 | pad | shift) & -(16 | pad | shift)
    assert mover._word == min(aligned, 8)
    assert mover._align == aligned // mover._word


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("programs", [1, 2, 5, 6, 7, 4096])
@pytest.mark.parametrize(("first", "count"), [(0, 0), (0, 1), (2, 1), (1, 3), (0, 6), (3, 3)])
def test_any_part_of_a_batch_by_any_number_of_programs(
    monkeypatch: pytest.MonkeyPatch, first: int, count: int, programs: int, device: str
) -> None:
    monkeypatch.setattr(tiles, "LAUNCHED_PROGRAMS", programs)
    case, twin = (build("different_dtypes", device=device) for _ in range(2))
    pitch = padded(case.layout().block_bytes, 8)
    check(case, twin, pitch, first=first, count=count)


def rows_of(nbytes: Sequence[int], stride: int, device: str) -> Case:
    """Rows of these sizes, every block's a stride apart, each in an allocation of its own."""
    made = []
    for i, n in enumerate(nbytes):
        random = torch.Generator().manual_seed(i)
        raw = torch.randint(0, 256, (NUM_BLOCKS, stride), dtype=torch.uint8, generator=random)
        made.append(raw.to(device)[:, :n])
    return Case(NUM_BLOCKS, made, [0] * len(made))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("nbytes", "stride", "word", "align", "tile", "num_tiles", "whole"),
    [
        ([64], 64, 8, 2, 8, 1, True),
        ([64, 64], 80, 8, 2, 8, 2, True),
        ([48], 64, 8, 2, 8, 1, False),
        ([64, 16], 64, 8, 2, 8, 2, False),
        ([16], 16, 8, 2, 2, 1, True),
        ([24], 32, 8, 1, 4, 1, False),
        ([64], 72, 8, 1, 8, 1, True),
        ([8], 8, 8, 1, 1, 1, True),
        ([12], 12, 4, 1, 4, 1, False),
        ([8, 4], 16, 4, 1, 2, 2, False),
        ([64], 68, 4, 1, 16, 1, True),
        ([6], 8, 2, 1, 4, 1, False),
        ([4], 6, 2, 1, 2, 1, True),
        ([5], 8, 1, 1, 8, 1, False),
        ([64, 1], 64, 1, 1, 64, 2, False),
        ([1], 1, 1, 1, 1, 1, True),
        ([8192], 8192, 8, 2, 1024, 1, True),
        ([16384, 8192], 16384, 8, 2, 1024, 3, True),
        ([16384 + 16], 16384 + 16, 8, 2, 1024, 3, False),
        ([24576 + 8, 8], 24592, 8, 1, 1024, 5, False),
        ([20000 + 4], 20480, 4, 1, 2048, 3, False),
        ([20000 + 2], 20480, 2, 1, 4096, 3, False),
        ([20001], 20001, 1, 1, 8192, 3, False),
    ],
)
def test_words_and_tiles_follow_from_sizes_and_alignment(
    nbytes: list[int], stride: int, word: int, align: int, tile: int, num_tiles: int,
    whole: bool, device: str,
) -> None:  # fmt: skip
    case, twin = (rows_of(nbytes, stride, device) for _ in range(2))
    mover = check(case, twin, padded(sum(nbytes), 16))
    assert (mover._word, mover._align, mover._tile) == (word, align, tile)
    assert mover._tiles.shape == (num_tiles, 4)
    assert mover._whole == whole


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_tensors_that_begin_anywhere(shift: int, device: str) -> None:
    cases = []
    for _ in range(2):
        random = torch.Generator().manual_seed(1)
        nbytes = NUM_BLOCKS * 64
        raw = torch.randint(0, 256, (16 + nbytes,), dtype=torch.uint8, generator=random)
        blocks = raw.to(device)[shift : shift + nbytes].view(NUM_BLOCKS, 64)
        cases.append(Case(NUM_BLOCKS, [blocks], [0]))
    assert check(*cases, pitch=64)._word == shift


@pytest.mark.parametrize("device", DEVICES)
def test_the_only_block(device: str) -> None:
    layout = BlockLayout([torch.arange(33, dtype=torch.uint8).to(device).view(1, 33)], 1, 0)
    flat = Flat(40, device)
    mover = TileMover(layout, 40, [flat.memory.data_ptr()])
    mover.move(current(device), True, flat.memory, torch.tensor([0]).to(device), 0, 1)
    assert flat.memory[:33].tolist() == list(range(33))
    assert bool((flat.memory[33:] == POISON).all())


@pytest.mark.gpu
@needs_gpu
def test_offsets_beyond_32_bits_on_both_sides() -> None:
    """The words are bytes here, so that a few GiB are enough."""
    num_blocks, nbytes, stride = 5 << 10, (1 << 20) - 1, 1 << 20
    rows, flat = (torch.zeros(num_blocks, stride, dtype=torch.uint8, device="cuda") for _ in "ab")
    layout = BlockLayout([rows[:, :nbytes]], num_blocks)
    mover = TileMover(layout, stride, [flat.data_ptr()])
    assert mover._word == 1
    ids = torch.arange(num_blocks, device="cuda")
    ids[[4500, 5119, 5118, 4099]] = torch.tensor([5119, 4500, 4099, 5118], device="cuda")
    rows[5119], rows[4099] = 7, 9
    mover.move(current("cuda"), True, flat.view(-1), ids, 0, num_blocks)
    assert bool((flat[4500, :nbytes] == 7).all())
    assert bool((flat[5118, :nbytes] == 9).all())
    assert int(flat.count_nonzero()) == 2 * nbytes
    rows.zero_()
    mover.move(current("cuda"), False, flat.view(-1), ids, 0, num_blocks)
    assert bool((rows[5119, :nbytes] == 7).all())
    assert bool((rows[4099, :nbytes] == 9).all())
    assert int(rows.count_nonzero()) == 2 * nbytes


def test_the_kernels_are_compiled_for_gpus_without_one() -> None:
    """Words of all tiles are moved 16 bytes at a time, also where only some rows are."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compiled.py"))]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = [line.split() for line in ran.stdout.splitlines()]
    assert [(gpu, name) for gpu, name, *_ in found] == [
        (gpu, name) for gpu in ("80", "90", "100") for name in ("move_tiles", "copy_ids")
    ]
    for _, name, *wide in found:
        assert name != "move_tiles" or (len(wide) == 12 and min(map(int, wide)) >= 8)
