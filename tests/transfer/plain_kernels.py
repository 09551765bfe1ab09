"""The kernels in numpy, for long runs: the same bytes moved, without Triton's interpreter.

That takes 10 ms for a few tiles, most of what a long run costs. `test_kernels_plain` compares both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from kvoffload_patch.transfer.backends import tiles as copy_tiles
from kvoffload_patch.transfer.backends.kernels import COUNT_BITS
from kvoffload_patch.transfer.integrity import MIX, PLACE

_BITS = (1 << 64) - 1
_INTS = {8: np.int64, 4: np.int32, 2: np.int16, 1: np.int8}


class Plain:
    """A function that is launched as a kernel is; one call does what all programs would."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._call


@contextmanager
def used() -> Iterator[None]:
    """Kernels that are launched meanwhile are these."""
    plain = {"move_tiles": Plain(move_tiles), "copy_ids": Plain(copy_ids)}
    with mock.patch.multiple(copy_tiles, **plain):
        yield


def copy_ids(source: Any, target: Any, first: int, count: int, SIZE: int) -> None:
    """As the kernel."""
    target[:count] = source[first : first + count]


def move_tiles(
    rows: Any, flat: Any, tiles: torch.Tensor, block_ids: torch.Tensor, num_blocks: int,
    first_block: int, num_tiles: int, first_tile: int, block_tiles: int, flat_pitch: int,
    flat_shift: int, first_slot: int, first_total: int, sums: Any, totals: Any,
    verdict: Any, *, TO_FLAT: bool, TILE: int, CHECK: bool, COMPLETE: bool, **_: Any,
) -> None:  # fmt: skip
    """As the kernel."""
    word = rows.dtype.primitive_bitwidth // 8
    table = tiles[first_tile : first_tile + num_tiles].tolist()
    for block in range(num_blocks):
        number, parts = int(block_ids[first_block + block]), []
        for start, stride, in_slot, words in table:
            at = rows.data_ptr() + (start + number * stride) * word
            packed = flat.data_ptr() + (block * flat_pitch + in_slot - flat_shift) * word
            source, target = (at, packed) if TO_FLAT else (packed, at)
            moved = ctypes.string_at(source, words * word)
            ctypes.memmove(target, moved, len(moved))
            if CHECK:
                parts.append(_part(np.frombuffer(moved, _INTS[word]), in_slot, TILE))
        if not CHECK:
            continue
        slot, at_total = int(block_ids[first_slot + block]), first_total + block
        noted = int(sums[slot])
        if not (TO_FLAT or COMPLETE or noted):
            continue
        total = _signed(int(totals[at_total]) + sum(parts))
        whole = total & ((1 << COUNT_BITS) - 1) == block_tiles
        totals[at_total] = 0 if whole else total
        if whole and TO_FLAT:
            sums[slot] = total
        elif whole and total != noted:
            verdict[0] = slot + 1


def _part(words: Any, begin: int, tile: int) -> int:
    """What a tile adds to its block's total."""
    padded = np.zeros(tile, np.int64)
    padded[: len(words)] = words
    places = np.arange(tile, dtype=np.int64) * np.int64(PLACE)
    mixed = (padded ^ (places + np.int64(_signed(begin * PLACE)))) * np.int64(MIX)
    mixed ^= (mixed >> 32) & 0xFFFFFFFF
    return (int(mixed.sum()) << COUNT_BITS) + 1


def _signed(value: int) -> int:
    """As 64 bits hold it."""
    value &= _BITS
    return value - (1 << 64) if value >> 63 else value
