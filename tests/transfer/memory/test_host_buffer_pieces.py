"""Sizes of the pieces in which slots are registered."""

from __future__ import annotations

import mmap

from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload_patch.transfer.memory.host_buffer import _slots_per_piece, slot_pitch

MIB = 1 << 20


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 1 << 26), st.sampled_from([1 << 16, MIB, 3 * MIB, 256 * MIB]))
def test_pieces_hold_whole_slots_and_begin_on_pages(block_bytes: int, piece_bytes: int) -> None:
    pitch = slot_pitch(block_bytes)
    count = _slots_per_piece(pitch, piece_bytes)
    assert count >= 1
    assert count * pitch % mmap.PAGESIZE == 0
    fewest = next(n for n in (1, 2, 4, 8) if n * pitch % mmap.PAGESIZE == 0)
    assert count * pitch <= max(piece_bytes, fewest * pitch)
    assert (count + 4096) * pitch > piece_bytes, "much smaller than allowed"
