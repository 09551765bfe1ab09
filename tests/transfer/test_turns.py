"""Every slot has one rank that stores to it."""

from __future__ import annotations

import pytest

from kvoffload_patch.transfer.turns import ALONE, Turn


@pytest.mark.parametrize("of", [1, 2, 3, 8])
def test_every_block_is_stored_by_one_rank_and_each_has_its_part(of: int) -> None:
    ids, slots = tuple(range(100, 148)), tuple(range(7, 55))
    parts = [Turn(at, of).own(ids, slots) for at in range(of)]
    pairs = sorted(pair for part in parts for pair in zip(*part))
    assert pairs == list(zip(ids, slots))
    assert {len(part[0]) for part in parts} == {48 // of}


def test_a_slot_is_always_the_same_ranks() -> None:
    turn = Turn(1, 2)
    assert turn.own((5, 6, 7), (3, 4, 9)) == ((5, 7), (3, 9))
    assert turn.own((9,), (4,)) == ((), ())
    assert ALONE.own((9,), (4,)) == ((9,), (4,))
