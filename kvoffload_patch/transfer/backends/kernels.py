"""The Triton kernels: one packs blocks, between the rows of KV tensors and one flat memory.

Rows are cut into tiles of one size, so that one launch moves any number of blocks of any layout.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("first", "count"))  # type: ignore[untyped-decorator]
def copy_ids(source, target, first, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy ``source[first : first + count]`` to the beginning of ``target``."""
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    tl.store(target + index, tl.load(source + first + index, mask=inside), mask=inside)


# A number that changes from call to call must not make a new kernel: that costs a compilation.
_PLAIN = ("num_blocks", "first_block", "num_tiles", "flat_pitch")


@triton.jit(do_not_specialize=_PLAIN)  # type: ignore[untyped-decorator]
def move_tiles(  # type: ignore[no-untyped-def] # Triton's own values
    rows, flat, tiles, block_ids, num_blocks, first_block, num_tiles, flat_pitch,
    TO_FLAT: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Copy ``num_tiles`` tiles of ``num_blocks`` blocks; all sizes and offsets are in words.

    Args:
        rows: any address; tiles are given relative to it.
        flat: the k-th block of the call has the entry that begins at ``k * flat_pitch``.
        tiles: ``int64 [*, 4]``: offset from ``rows`` in block 0, stride over blocks, offset in
            a slot, words.
        block_ids: ``int64 [*]``; the blocks of this call begin at ``first_block``.
        TO_FLAT: rows to flat, or flat to rows.
        ALIGN: a power of two that divides every offset, stride and pitch.
        WHOLE: whether every tile has TILE words.
    """
    # Packed bytes and their rows are not read again soon. Left in the device's cache, they slow
    # copies of 256 KiB at a time down by 6 % (docs/performance.md).
    index = tl.arange(0, TILE)
    for item in range(tl.program_id(0), num_blocks * num_tiles, tl.num_programs(0)):
        block = item // num_tiles
        tile = tiles + (item % num_tiles) * 4
        entry = block.to(tl.int64)
        in_rows = tl.load(tile) + tl.load(block_ids + first_block + block) * tl.load(tile + 1)
        in_flat = entry * flat_pitch + tl.load(tile + 2)
        row = rows + tl.multiple_of(in_rows, ALIGN) + index
        packed = flat + tl.multiple_of(in_flat, ALIGN) + index
        if WHOLE:
            if TO_FLAT:
                words = tl.load(row, eviction_policy="evict_first")
                tl.store(packed, words, eviction_policy="evict_first")
            else:
                tl.store(row, tl.load(packed))
        else:
            inside = index < tl.multiple_of(tl.load(tile + 3), ALIGN)
            if TO_FLAT:
                words = tl.load(row, mask=inside, eviction_policy="evict_first")
                tl.store(packed, words, mask=inside, eviction_policy="evict_first")
            else:
                tl.store(row, tl.load(packed, mask=inside), mask=inside)
