"""Lookups by request: valid until what they rest on has changed, and no longer kept then."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvoffload_patch.integration.engine.requests.lookup import LookupCache, LookupResult


@dataclass(frozen=True)
class Block:
    """A GPU block."""

    block_id: int


def found(
    blocks: tuple[int, ...] = (), missing: tuple[str, ...] = (), tokens: int = 100
) -> LookupResult:
    """A lookup that rests on these blocks and lacks these keys."""
    result = LookupResult(tokens)
    result.tokens = 16 * len(blocks)
    result.gpu_blocks = [Block(b) for b in blocks]
    result.missing = list(missing)
    return result


def assert_empty(cache: LookupCache) -> None:
    """Nothing is left, in the reverse indexes either."""
    assert (cache._results, cache._by_block, cache._by_key) == ({}, {}, {})
    assert (cache._new, cache._reused) == ({}, set())


@pytest.fixture
def cache() -> LookupCache:
    """Two lookups that share a block and a key."""
    cache = LookupCache()
    cache.put("a", found((1, 2), ("x", "y")))
    cache.put("b", found((2, 3), ("y", "z")))
    cache.end_step()
    return cache


def test_a_lookup_is_remembered_as_it_was(cache: LookupCache) -> None:
    result = found((1, 2), ("x", "y"))
    cache.put("a", result)
    cache.end_step()
    assert cache.get("a", 100) is result
    assert cache.get("c", 100) is None


@pytest.mark.parametrize("deferred", [False, True])
def test_what_vllm_has_to_be_given_is_not_kept_for_another_step(deferred: bool) -> None:
    """It is given in the step that has looked it up, or it has still to be looked up to be so."""
    cache, result = LookupCache(), found((1, 2))
    result.only_given, result.deferred = True, deferred
    cache.put("a", result)
    assert cache.get("a", 100) is result
    cache.end_step()
    assert (cache.get("a", 100) is not None) == deferred


@pytest.mark.parametrize(("reused", "kept"), [([1], "b"), ([3], "a"), ([2], ""), ([1, 3], "")])
def test_reuse_of_a_block_drops_the_lookups_that_rest_on_it(
    cache: LookupCache, reused: list[int], kept: str
) -> None:
    cache.blocks_reused(reused)
    assert [name for name in "ab" if cache.get(name, 100)] == list(kept)


@pytest.mark.parametrize(("stored", "kept"), [(["x"], "b"), (["z"], "a"), (["y"], "")])
def test_a_missing_key_that_is_stored_drops_the_lookups_that_lack_it(
    cache: LookupCache, stored: list[str], kept: str
) -> None:
    cache.keys_stored(stored)
    assert [name for name in "ab" if cache.get(name, 100)] == list(kept)


def test_unrelated_blocks_and_keys_keep_it(cache: LookupCache) -> None:
    cache.blocks_reused([0, 4, 5])
    cache.keys_stored(["w", "1"])
    cache.forget("c")
    assert cache.get("a", 100) and cache.get("b", 100)


def test_a_request_of_another_length_is_unknown(cache: LookupCache) -> None:
    assert cache.get("a", 101) is None
    assert cache.get("a", 99) is None
    cache.put("a", found((9,), ("q",), tokens=101))
    assert cache.get("a", 101)


def test_a_newer_lookup_leaves_nothing_of_the_older_one(cache: LookupCache) -> None:
    cache.put("a", found((7,), ("q",)))
    cache.end_step()
    cache.blocks_reused([1])
    cache.keys_stored(["x"])
    assert cache.get("a", 100)
    assert cache._by_block == {2: {"b"}, 3: {"b"}, 7: {"a"}}
    assert cache._by_key == {"y": {"b"}, "z": {"b"}, "q": {"a"}}


def test_forgetting_leaves_no_residue(cache: LookupCache) -> None:
    cache.forget("a")
    assert [*cache._results] == ["b"]
    cache.forget("b")
    assert_empty(cache)
    cache.forget("b")


def test_dropping_leaves_no_residue(cache: LookupCache) -> None:
    cache.blocks_reused([1])
    cache.keys_stored(["z"])
    assert_empty(cache)


def test_clearing_leaves_no_residue(cache: LookupCache) -> None:
    cache.clear()
    assert_empty(cache)


def test_repeated_blocks_and_keys_leave_no_residue() -> None:
    cache = LookupCache()
    cache.put("a", found((1, 1), ("x", "x")))
    cache.end_step()
    cache.forget("a")
    assert_empty(cache)


# Lookups of the step


def test_a_lookup_of_this_step_is_there_and_in_no_index() -> None:
    cache = LookupCache()
    cache.put("a", found((1, 2), ("x",)))
    assert cache.get("a", 100) and [*cache._new] == ["a"]
    assert cache.get("a", 101) is None
    assert (cache._by_block, cache._by_key) == ({}, {})


def test_one_that_is_forgotten_within_its_step_leaves_no_residue() -> None:
    cache = LookupCache()
    cache.put("a", found((1, 2), ("x",)))
    cache.forget("a")
    cache.end_step()
    assert_empty(cache)


@pytest.mark.parametrize("reused", [[1], [2], [2, 9]])
def test_a_block_handed_out_within_the_step_drops_it_at_its_end(reused: list[int]) -> None:
    cache = LookupCache()
    cache.put("a", found((1, 2), ("x",)))
    cache.put("b", found((3,)))
    cache.blocks_reused(reused)
    cache.end_step()
    assert [name for name in "ab" if cache.get(name, 100)] == ["b"]
    cache.forget("b")
    assert_empty(cache)


def test_what_was_handed_out_in_one_step_says_nothing_of_the_next(cache: LookupCache) -> None:
    cache.put("c", found((8,)))
    cache.blocks_reused([7])
    cache.end_step()
    cache.put("d", found((7,)))
    cache.end_step()
    assert cache.get("d", 100)


def test_clearing_within_a_step_leaves_no_residue() -> None:
    cache = LookupCache()
    cache.put("a", found((1,), ("x",)))
    cache.blocks_reused([1])
    cache.clear()
    assert_empty(cache)


def test_what_is_handed_out_is_kept_only_for_a_lookup_that_rests_on_a_block() -> None:
    """A prompt of which nothing is found takes many blocks."""
    cache = LookupCache()
    cache.put("a", found(missing=("x",)))
    cache.blocks_reused([1, 2])
    assert cache._reused == set()
    cache.put("b", found((1, 3)))
    cache.blocks_reused([4, 3])
    assert cache._reused == {3, 4}
    cache.end_step()
    assert cache.get("a", 100) is not None, "it rests on no block"
    assert cache.get("b", 100) is None, "it rests on one that was handed out"
    cache.put("c", found(missing=("x",)))
    cache.blocks_reused([5])
    assert cache._reused == set()
