"""The memo of lookups: valid until what they rest on has changed, and no longer kept then."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvoffload_patch.integration.engine.lookup_cache import Known, LookupCache


@dataclass(frozen=True)
class Block:
    """A GPU block."""

    block_id: int


def known(blocks: tuple[int, ...] = (), missing: tuple[str, ...] = (), tokens: int = 100) -> Known:
    """A lookup that rests on these blocks and lacks these keys."""
    return Known(tokens, 16 * len(blocks), tuple(Block(b) for b in blocks), missing)


def assert_empty(memo: LookupCache) -> None:
    """Nothing is left, in the reverse indexes either."""
    assert (memo._known, memo._by_block, memo._by_key) == ({}, {}, {})
    assert (memo._new, memo._reused, len(memo)) == ({}, set(), 0)


@pytest.fixture
def memo() -> LookupCache:
    """Two lookups that share a block and a key."""
    memo = LookupCache()
    memo.put("a", known((1, 2), ("x", "y")))
    memo.put("b", known((2, 3), ("y", "z")))
    memo.end_step()
    return memo


def test_a_lookup_is_remembered_as_it_was(memo: LookupCache) -> None:
    assert memo.get("a", 100) == known((1, 2), ("x", "y"))
    assert memo.get("c", 100) is None


@pytest.mark.parametrize(("reused", "kept"), [([1], "b"), ([3], "a"), ([2], ""), ([1, 3], "")])
def test_reuse_of_a_block_drops_the_lookups_that_rest_on_it(
    memo: LookupCache, reused: list[int], kept: str
) -> None:
    memo.blocks_reused(reused)
    assert [name for name in "ab" if memo.get(name, 100)] == list(kept)


@pytest.mark.parametrize(("stored", "kept"), [(["x"], "b"), (["z"], "a"), (["y"], "")])
def test_a_missing_key_that_is_stored_drops_the_lookups_that_lack_it(
    memo: LookupCache, stored: list[str], kept: str
) -> None:
    memo.keys_stored(stored)
    assert [name for name in "ab" if memo.get(name, 100)] == list(kept)


def test_unrelated_blocks_and_keys_keep_it(memo: LookupCache) -> None:
    memo.blocks_reused([0, 4, 5])
    memo.keys_stored(["w", "1"])
    memo.forget("c")
    assert memo.get("a", 100) and memo.get("b", 100)


def test_a_request_of_another_length_is_unknown(memo: LookupCache) -> None:
    assert memo.get("a", 101) is None
    assert memo.get("a", 99) is None
    memo.put("a", known((9,), ("q",), tokens=101))
    assert memo.get("a", 101)


def test_a_newer_lookup_leaves_nothing_of_the_older_one(memo: LookupCache) -> None:
    memo.put("a", known((7,), ("q",)))
    memo.end_step()
    memo.blocks_reused([1])
    memo.keys_stored(["x"])
    assert memo.get("a", 100)
    assert memo._by_block == {2: {"b"}, 3: {"b"}, 7: {"a"}}
    assert memo._by_key == {"y": {"b"}, "z": {"b"}, "q": {"a"}}


def test_forgetting_leaves_no_residue(memo: LookupCache) -> None:
    memo.forget("a")
    assert len(memo) == 1
    memo.forget("b")
    assert_empty(memo)
    memo.forget("b")


def test_dropping_leaves_no_residue(memo: LookupCache) -> None:
    memo.blocks_reused([1])
    memo.keys_stored(["z"])
    assert_empty(memo)


def test_clearing_leaves_no_residue(memo: LookupCache) -> None:
    memo.clear()
    assert_empty(memo)


def test_repeated_blocks_and_keys_leave_no_residue() -> None:
    memo = LookupCache()
    memo.put("a", known((1, 1), ("x", "x")))
    memo.end_step()
    memo.forget("a")
    assert_empty(memo)


# Lookups of the step


def test_a_lookup_of_this_step_is_known_and_in_no_index() -> None:
    memo = LookupCache()
    memo.put("a", known((1, 2), ("x",)))
    assert memo.get("a", 100) and "a" in memo and len(memo) == 1
    assert memo.get("a", 101) is None
    assert (memo._by_block, memo._by_key) == ({}, {})


def test_one_that_is_forgotten_within_its_step_leaves_no_residue() -> None:
    memo = LookupCache()
    memo.put("a", known((1, 2), ("x",)))
    memo.forget("a")
    memo.end_step()
    assert_empty(memo)


@pytest.mark.parametrize("reused", [[1], [2], [2, 9]])
def test_a_block_handed_out_within_the_step_drops_it_at_its_end(reused: list[int]) -> None:
    memo = LookupCache()
    memo.put("a", known((1, 2), ("x",)))
    memo.put("b", known((3,)))
    memo.blocks_reused(reused)
    memo.end_step()
    assert [name for name in "ab" if name in memo] == ["b"]
    memo.forget("b")
    assert_empty(memo)


def test_what_was_handed_out_in_one_step_says_nothing_of_the_next(memo: LookupCache) -> None:
    memo.put("c", known((8,)))
    memo.blocks_reused([7])
    memo.end_step()
    memo.put("d", known((7,)))
    memo.end_step()
    assert memo.get("d", 100)


def test_clearing_within_a_step_leaves_no_residue() -> None:
    memo = LookupCache()
    memo.put("a", known((1,), ("x",)))
    memo.blocks_reused([1])
    memo.clear()
    assert_empty(memo)
