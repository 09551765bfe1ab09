"""Least recently used first, and nothing to evict is a KeyError."""

from __future__ import annotations

import pytest

from kvoffload_patch.tier.policy import LRUPolicy


def test_keys_leave_in_the_order_in_which_they_were_last_used() -> None:
    policy = LRUPolicy()
    for key in "abcd":
        policy.add(key)
    policy.touch("a")
    policy.remove("c")
    assert len(policy) == 3
    assert [policy.pop() for _ in range(3)] == ["b", "d", "a"]
    assert len(policy) == 0


def test_an_empty_policy_has_nothing_to_evict() -> None:
    with pytest.raises(KeyError):
        LRUPolicy().pop()


def test_a_removed_key_that_is_added_again_is_the_most_recent() -> None:
    policy = LRUPolicy()
    for key in "ab":
        policy.add(key)
    policy.remove("a")
    policy.add("a")
    assert policy.pop() == "b"
