"""The Triton kernels: one packs blocks, between the rows of KV tensors and one flat memory.

Rows are cut into tiles of one size, so that one launch moves any number of blocks of any layout.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvoffload_patch.transfer.integrity import MIX, PLACE

COUNT_BITS = 16  # of the tiles of a block


@triton.jit(do_not_specialize=("first", "count"))  # type: ignore[untyped-decorator]
def copy_ids(source, target, first, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy ``source[first : first + count]`` to the beginning of ``target``."""
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    tl.store(target + index, tl.load(source + first + index, mask=inside), mask=inside)


# A number that changes from call to call must not make a new kernel: that costs a compilation.
_PLAIN = (
    "num_blocks", "first_block", "num_tiles", "first_tile", "block_tiles", "flat_pitch",
    "flat_shift", "first_slot", "first_total",
)  # fmt: skip
_PLACE = tl.constexpr(PLACE)
_MIX = tl.constexpr(MIX)
# Of a sum so many low bits count the tiles that are in it; the others are the checksum.
_COUNT_BITS = tl.constexpr(COUNT_BITS)
_COUNT = tl.constexpr((1 << COUNT_BITS) - 1)


@triton.jit
def _add_tile(words, begin, places, total, num_tiles):  # type: ignore[no-untyped-def]
    """Add a tile to the total of its block; the checksum if it is the last one, or 0.

    The number of tiles is in a checksum, so none is 0.
    """
    mixed = (words.to(tl.int64) ^ (begin * _PLACE + places)) * _MIX
    mixed = mixed ^ ((mixed >> 32) & 0xFFFFFFFF)
    part = (tl.sum(mixed, axis=0) << _COUNT_BITS) + 1
    added = tl.atomic_add(total, part) + part
    checksum = tl.where((added & _COUNT) == num_tiles, added, 0)
    if checksum != 0:
        tl.store(total, 0)
    return checksum


@triton.jit  # type: ignore[untyped-decorator]
def _check_tile(  # type: ignore[no-untyped-def]
    words, begin, places, total, num_tiles, checksum, slot, verdict,
    TO_FLAT: tl.constexpr, COMPLETE: tl.constexpr,
):  # fmt: skip
    """Make or compare the checksum of a block, once all its tiles are there.

    Args:
        words: a tile, which is at ``begin`` in the block.
        checksum: where it is kept.
        COMPLETE: whether every slot that is loaded from has one; else some have 0.
    """
    if TO_FLAT:
        made = _add_tile(words, begin, places, total, num_tiles)
        if made != 0:
            tl.store(checksum, made)
    else:
        noted = tl.load(checksum)
        if COMPLETE or (noted != 0):
            found = _add_tile(words, begin, places, total, num_tiles)
            if (found != 0) and (found != noted):
                tl.store(verdict, slot + 1)


@triton.jit(do_not_specialize=_PLAIN)  # type: ignore[untyped-decorator]
def move_tiles(  # type: ignore[no-untyped-def] # Triton's own values
    rows, flat, tiles, block_ids, num_blocks, first_block, num_tiles, first_tile, block_tiles,
    flat_pitch, flat_shift, first_slot, first_total, sums, totals, verdict,
    TO_FLAT: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
    CHECK: tl.constexpr, COMPLETE: tl.constexpr,
):  # fmt: skip
    """Copy ``num_tiles`` tiles of ``num_blocks`` blocks; all sizes and offsets are in words.

    These are the tiles from ``first_tile`` on, of the ``block_tiles`` that a block has.

    Checksums are made of what is copied anyway. Each tile adds its part and 1 to its block's total
    in one go; the one that finds by that 1 that it is the last has the checksum.

    Args:
        rows: any address; tiles are given relative to it.
        flat: the k-th block of the call has the entry that begins at ``k * flat_pitch``, with what
            is at ``flat_shift`` in a slot.
        tiles: ``int64 [*, 4]``: offset from ``rows`` in block 0, stride over blocks, offset in
            a slot, words.
        block_ids: ``int64 [*]``; the blocks of this call begin at ``first_block``, their slots at
            ``first_slot``.
        TO_FLAT: rows to flat, or flat to rows.
        ALIGN: a power of two that divides every offset, stride and pitch.
        WHOLE: whether every tile has TILE words.
        CHECK: whether checksums are made or compared; if not, what follows is not used.
        COMPLETE: whether every slot that is loaded from has a checksum.
        sums: ``int64``, for each slot its checksum, or 0.
        totals: ``int64``; those of the blocks of the call begin at ``first_total``. 0 before a
            block's first tile and after its last.
        verdict: ``int64``: where to write a slot that does not match, counted from 1.
    """
    # Packed bytes and their rows are not read again soon. Left in the device's cache, they slow
    # copies of small blocks down.
    index = tl.arange(0, TILE)
    places = index.to(tl.int64) * _PLACE
    for item in range(tl.program_id(0), num_blocks * num_tiles, tl.num_programs(0)):
        block = item // num_tiles
        tile = tiles + (first_tile + item % num_tiles) * 4
        entry = block.to(tl.int64)
        in_slot = tl.load(tile + 2)
        in_rows = tl.load(tile) + tl.load(block_ids + first_block + block) * tl.load(tile + 1)
        in_flat = entry * flat_pitch + in_slot - flat_shift
        row = rows + tl.multiple_of(in_rows, ALIGN) + index
        packed = flat + tl.multiple_of(in_flat, ALIGN) + index
        if WHOLE:
            if TO_FLAT:
                words = tl.load(row, eviction_policy="evict_first")
                tl.store(packed, words, eviction_policy="evict_first")
            else:
                words = tl.load(packed)
                tl.store(row, words)
        else:
            inside = index < tl.multiple_of(tl.load(tile + 3), ALIGN)
            if TO_FLAT:
                words = tl.load(row, mask=inside, other=0, eviction_policy="evict_first")
                tl.store(packed, words, mask=inside, eviction_policy="evict_first")
            else:
                words = tl.load(packed, mask=inside, other=0)
                tl.store(row, words, mask=inside)
        if CHECK:
            slot = tl.load(block_ids + first_slot + block)
            _check_tile(
                words, in_slot, places, totals + first_total + block, block_tiles, sums + slot,
                slot, verdict, TO_FLAT, COMPLETE,
            )  # fmt: skip
