"""The rows of a layout as tiles of one size, and launches of the kernel over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvoffload_patch.transfer.backends.ids import IdUploader
from kvoffload_patch.transfer.backends.kernels import COUNT_BITS, copy_ids, move_tiles
from kvoffload_patch.transfer.backends.launches import Launcher, aligned
from kvoffload_patch.transfer.device import device_of
from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.integrity import Checksums, Verdicts
from kvoffload_patch.transfer.layout import BlockLayout, Rows
from kvoffload_patch.transfer.tuning import (
    IDS_PROGRAM_BLOCKS,
    LAUNCHED_PROGRAMS,
    TILE_BYTES,
)

_WORDS = ((8, tl.int64), (4, tl.int32), (2, tl.int16), (1, tl.int8))
_VECTOR = 16  # bytes that a thread moves at once, at most


class Check(NamedTuple):
    """What `move` needs to make or compare checksums; see the kernel.

    Attributes:
        first_slot: where the slots of the blocks begin, beside their numbers.
        totals: ``int64``; zeros.
        first_total: where those of the blocks begin in it.
        verdict: of a load: ``int64``, where it writes to; None: it is not compared.
    """

    first_slot: int
    totals: torch.Tensor
    first_total: int = 0
    verdict: torch.Tensor | None = None


class TileMover:
    """Moves blocks between KV tensors and flat memory.

    Args:
        layout: whose blocks are moved.
        pitch: bytes from one entry of the flat memory to the next.
        flats: pointers to all flat memory that will be used, for its alignment.
        checksums: of the slots that flat memory is copied to and from; None for none.

    Raises:
        TransferError: there are to be checksums, and a block has more tiles than they can count.
    """

    def __init__(
        self,
        layout: BlockLayout,
        pitch: int,
        flats: Sequence[int],
        checksums: Checksums | None = None,
    ) -> None:
        rows = layout.rows
        starts = [row.data_ptr() for row in rows]
        strides = [row.stride(0) for row in rows]
        common = gcd(_VECTOR, pitch, *flats, *starts, *strides, *layout.offsets)
        common = gcd(common, *(row.shape[1] for row in rows))
        self._word, self._dtype = next((n, dtype) for n, dtype in _WORDS if common % n == 0)
        self._align = common // self._word
        self._pitch = pitch
        longest = max(row.shape[1] for row in rows) // self._word
        self._tile = min(TILE_BYTES // self._word, 1 << (longest - 1).bit_length())
        self._base = rows[0].data_ptr()
        self._rows = triton.reinterpret(rows[0], self._dtype)
        table, self._tile_of_row = self._cut(layout)
        self._offsets = [*layout.offsets, layout.block_bytes]
        self._whole = all(words == self._tile for *_, words in table)
        self._tiles = torch.tensor(table, dtype=torch.int64, device=layout.device)
        self._num_tiles = len(table)
        if checksums is not None and self._num_tiles >> COUNT_BITS:
            raise TransferError(
                f"expected blocks of fewer than {1 << COUNT_BITS} tiles, found {self._num_tiles}, "
                "more than checksums count; set KVOFFLOAD_INTEGRITY=off."
            )

        self._checksums = checksums
        device = device_of(layout.device)
        self._launchers = {
            way: Launcher(move_tiles, device, self._constants(*way), num_warps=4)
            for way in product((False, True), repeat=2)
        }

    def _constants(self, to_flat: bool, check: bool) -> dict[str, Any]:
        """In the kernel's order."""
        complete = check and self._checksums is not None and self._checksums.complete
        return {
            "TO_FLAT": to_flat, "TILE": self._tile, "ALIGN": self._align, "WHOLE": self._whole,
            "CHECK": check, "COMPLETE": complete,
        }  # fmt: skip

    def _cut(self, layout: BlockLayout) -> tuple[list[tuple[int, int, int, int]], list[int]]:
        """The table of tiles, and in it the begin of each row's and the end of the last one's."""
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
        stream: Any,
        to_flat: bool,
        flat: torch.Tensor,
        block_ids: torch.Tensor,
        first: int,
        count: int,
        check: Check | None = None,
        rows: Rows | None = None,
    ) -> None:
        """Move ``block_ids[first : first + count]`` to or from entries of ``flat``.

        Args:
            flat: ``uint8``; entries are a slot pitch apart; given ``rows``, there are no gaps.
            check: how checksums are made or compared, where there are any.
            rows: only these rows of the blocks, and of their slots.
        """
        first_tile, end_tile, pitch, shift = 0, self._num_tiles, self._pitch, 0
        if rows is not None:
            first_tile, end_tile = (self._tile_of_row[row] for row in rows)
            shift = self._offsets[rows[0]]
            pitch = self._offsets[rows[1]] - shift
        num_tiles = end_tile - first_tile
        items = count * num_tiles
        if items == 0:
            return
        sums = totals = verdict = None
        first_slot = first_total = 0
        if self._checksums is not None and check and (to_flat or check.verdict is not None):
            first_slot, totals, first_total, verdict = check
            sums = self._checksums.sums
        self._launchers[to_flat, sums is not None].launch(
            min(items, LAUNCHED_PROGRAMS), stream,
            "moved" if aligned(flat, block_ids, totals, verdict) else None,
            self._rows, triton.reinterpret(flat, self._dtype), self._tiles,
            block_ids, count, first, num_tiles, first_tile, self._num_tiles,
            pitch // self._word, shift // self._word,
            first_slot, first_total, sums, totals, verdict,
        )  # fmt: skip

    def clear(self, totals: torch.Tensor) -> None:
        """Forget the parts of checksums of blocks that were not moved as a whole."""
        totals.zero_()


def id_copier(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, int, int, Any], None]:
    """What `IdUploader` copies numbers to the device with: a kernel that reads CPU memory.

    Not a copy: the copy engine of a direction is one queue for the whole device, so that the few
    numbers of a store would wait there for a slice of a load.
    """
    launcher = Launcher(copy_ids, device_of(device), {"SIZE": IDS_PROGRAM_BLOCKS})

    def copy(pinned: torch.Tensor, target: torch.Tensor, first: int, count: int, on: Any) -> None:
        programs = -(-count // IDS_PROGRAM_BLOCKS)
        kind = "ids" if aligned(pinned, target) else None
        launcher.launch(programs, on, kind, pinned, target, first, count)

    return copy


def warm_up(device: torch.device, checked: bool = False) -> None:
    """Compile the kernels as most layouts need them, ahead of time; it takes about a second.

    Args:
        checked: whether blocks are to have checksums.
    """
    tensor = torch.zeros(2, TILE_BYTES, dtype=torch.uint8, device=device)
    flat = torch.zeros_like(tensor).view(-1)
    checksums = Checksums(2, device) if checked else None
    mover = TileMover(BlockLayout([tensor], 2), TILE_BYTES, [flat.data_ptr()], checksums)
    numbers = torch.tensor([0, 1, 0, 1], device=device)
    ids, stream = IdUploader(device, 2, 2, id_copier(device)), device_of(device).current_stream()
    ids.upload(np.array([0, 1]), stream)
    mover.move(stream, False, flat, numbers, 0, 2)
    if checksums is None:
        mover.move(stream, True, flat, numbers, 0, 2)
        return
    totals = torch.zeros(2, dtype=torch.int64, device=device)
    mover.move(stream, True, flat, numbers, 0, 2, Check(2, totals))
    finds, _, _ = Verdicts(checksums, 1).begin()
    mover.move(stream, False, flat, numbers, 0, 2, Check(2, totals, 0, finds))
