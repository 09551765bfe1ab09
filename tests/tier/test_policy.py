"""Least recently used first; what is pinned stays, and what left is not chosen."""

from __future__ import annotations

from kvoffload_patch.tier.policy import LRUPolicy


def holding(keys: str) -> LRUPolicy:
    policy = LRUPolicy()
    policy.miss(keys)
    policy.insert(keys)
    return policy


def test_keys_leave_in_the_order_in_which_they_were_last_used() -> None:
    policy = holding("abcd")
    policy.hit("ba")
    assert policy.evict(3) == ["c", "d", "b"]
    assert policy.evict(3) == ["a"]
    assert policy.evict(3) == []


def test_a_key_that_is_not_there_cannot_be_used() -> None:
    policy = holding("ab")
    policy.hit("axa")
    assert policy.evict(3) == ["b", "a"]


def test_a_pinned_key_is_not_chosen_and_is_the_most_recent_afterwards() -> None:
    policy = holding("abc")
    policy.pin("ab")
    policy.hit("b")
    assert policy.evict(3) == ["c"]
    policy.insert("d")
    policy.unpin("ba")
    assert policy.evict(3) == ["d", "b", "a"]


def test_a_removed_key_is_not_chosen_pinned_or_not() -> None:
    policy = holding("abc")
    policy.pin("c")
    policy.remove("cax")
    assert policy.evict(3) == ["b"]
