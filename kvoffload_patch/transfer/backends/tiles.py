"""The rows of a layout as tiles of one size, and launches of the kernel over them."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np
import torch
import triton
import triton.language as tl

from kvoffload_patch.transfer.backends.ids import IdUploader
from kvoffload_patch.transfer.backends.kernels import move_tiles
from kvoffload_patch.transfer.device import device_of
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.tuning import LAUNCHED_PROGRAMS, TILE_BYTES

_WORDS = ((8, tl.int64), (4, tl.int32), (2, tl.int16), (1, tl.int8))
_VECTOR = 16  # bytes that a thread moves at once, at most


class TileMover:
    """Moves blocks between KV tensors and flat memory on the current stream.

    Args:
        layout: whose blocks are moved.
        pitch: bytes from one entry of the flat memory to the next, where it is not given.
        flats: pointers to all flat memory that will be used, for its alignment.
    """

    def __init__(self, layout: BlockLayout, pitch: int, flats: Sequence[int]) -> None:
        rows = layout.rows
        starts = [row.data_ptr() for row in rows]
        strides = [row.stride(0) for row in rows]
        common = gcd(_VECTOR, pitch, *flats, *starts, *strides, *layout.offsets)
        common = gcd(common, *(row.shape[1] for row in rows))
        self._offsets = [*layout.offsets, layout.block_bytes]
        self._word, self._dtype = next((n, dtype) for n, dtype in _WORDS if common % n == 0)
        self._align = common // self._word
        self._pitch = pitch
        longest = max(row.shape[1] for row in rows) // self._word
        self._tile = min(TILE_BYTES // self._word, 1 << (longest - 1).bit_length())
        self._base = rows[0].data_ptr()
        self._rows = triton.reinterpret(rows[0], self._dtype)
        table, self._tile_of_row = self._cut(layout)
        self._whole = all(words == self._tile for *_, words in table)
        self._tiles = torch.tensor(table, dtype=torch.int64, device=layout.device)

    def _cut(self, layout: BlockLayout) -> tuple[list[tuple[int, int, int, int]], list[int]]:
        """The table of tiles, and where each row's tiles begin in it (and end, as one more)."""
        base, word = self._base, self._word
        table: list[tuple[int, int, int, int]] = []
        begins = [0]
        for row, offset in zip(layout.rows, layout.offsets):
            start = (row.data_ptr() - base) // word
            words = row.shape[1] // word
            for at in range(0, words, self._tile):
                size = min(self._tile, words - at)
                table.append((start + at, row.stride(0) // word, offset // word + at, size))
            begins.append(len(table))
        return table, begins

    def move(
        self,
        to_flat: bool,
        flat: torch.Tensor,
        block_ids: torch.Tensor,
        first: int,
        count: int,
        flat_ids: torch.Tensor | None = None,
        rows: tuple[int, int] | None = None,
        programs: int = LAUNCHED_PROGRAMS,
    ) -> None:
        """Move ``block_ids[first : first + count]`` to or from entries of ``flat``.

        Args:
            flat: ``uint8``; entries are a slot pitch apart, or those of a range of rows packed.
            flat_ids: the entry of each block, beside ``block_ids``; 0, 1, ... where not given.
            rows: only these rows (first, end); entries then hold their bytes alone.
            programs: how many run at most.
        """
        begin, end, pitch, shift = 0, self._tile_of_row[-1], self._pitch, 0
        if rows is not None:
            begin, end = self._tile_of_row[rows[0]], self._tile_of_row[rows[1]]
            shift = self._offsets[rows[0]]
            pitch = self._offsets[rows[1]] - shift
        items = count * (end - begin)
        if items == 0:
            return
        move_tiles[(min(items, programs),)](
            self._rows, triton.reinterpret(flat, self._dtype), self._tiles,
            block_ids, block_ids if flat_ids is None else flat_ids,
            count, first, end - begin, begin, pitch // self._word, shift // self._word,
            TO_FLAT=to_flat, INDEXED=flat_ids is not None, TILE=self._tile,
            ALIGN=self._align, WHOLE=self._whole, num_warps=4,
        )  # fmt: skip


def warm_up(device: torch.device) -> None:
    """Compile the kernels as most layouts need them, ahead of time; it takes about a second."""
    tensor = torch.zeros(2, TILE_BYTES, dtype=torch.uint8, device=device)
    flat = torch.zeros_like(tensor).view(-1)
    mover = TileMover(BlockLayout([tensor], 2), TILE_BYTES, [flat.data_ptr()])
    blocks = torch.tensor([0, 1], device=device)
    IdUploader(device).upload(np.array([0, 1]), device_of(device).current_stream())
    for to_flat in (True, False):
        for flat_ids in (None, blocks):
            mover.move(to_flat, flat, blocks, 0, 2, flat_ids)
