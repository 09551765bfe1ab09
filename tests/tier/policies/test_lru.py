"""Least recently used first; what is pinned stays, and what left is not chosen."""

from __future__ import annotations

import random

from kvoffload_patch.tier.policies.lru import LRUPolicy

KEYS = "abcdx"


def slots(keys: str) -> list[int]:
    return [KEYS.index(key) for key in keys]


def evicted(policy: LRUPolicy, count: int) -> str:
    return "".join(KEYS[slot] for slot in policy.evict(count))


def holding(keys: str) -> LRUPolicy:
    policy = LRUPolicy(KEYS)
    policy.miss(keys)
    policy.insert(slots(keys))
    return policy


def test_slots_are_chosen_in_the_order_in_which_they_were_last_used() -> None:
    policy = holding("abcd")
    policy.hit(slots("ba"))
    assert evicted(policy, 3) == "cdb"
    assert evicted(policy, 3) == "a"
    assert evicted(policy, 3) == ""


def test_a_slot_that_is_not_there_cannot_be_used() -> None:
    policy = holding("ab")
    policy.hit(slots("axa"))
    assert evicted(policy, 3) == "ba"


def test_a_pinned_slot_is_not_chosen_and_is_the_most_recent_afterwards() -> None:
    policy = holding("abc")
    policy.pin(slots("ab"))
    policy.hit(slots("b"))
    assert evicted(policy, 3) == "c"
    policy.insert(slots("d"))
    policy.unpin(slots("ba"))
    assert evicted(policy, 3) == "dba"


def test_a_removed_slot_is_not_chosen_pinned_or_not() -> None:
    policy = holding("abc")
    policy.pin(slots("c"))
    policy.remove(slots("cax"))
    assert evicted(policy, 3) == "b"


def test_slots_that_were_taken_out_of_a_batch_in_any_order_are_not_chosen_twice() -> None:
    rng = random.Random(5)
    policy = LRUPolicy([None] * 64)
    policy.insert(range(64))
    order = list(range(64))
    for _ in range(200):
        used = rng.sample(range(64), rng.randrange(1, 9))
        policy.hit(used)
        order = [slot for slot in order if slot not in used] + [s for s in used if s in order]
        if rng.random() < 0.2:
            count = rng.randrange(4)
            assert list(policy.evict(count)) == order[:count]
            order = order[count:]
    assert list(policy.evict(64)) == order


def test_slots_that_become_usable_later_are_chosen_like_the_others() -> None:
    key_of = ["a"]
    policy = LRUPolicy(key_of)
    policy.insert([0])
    key_of += "bc"
    policy.grow()
    policy.hit([2, 0, 1])  # two of them are being written
    policy.insert([2, 1])
    assert list(policy.evict(9)) == [0, 2, 1]


def test_what_a_request_used_and_stored_leaves_from_its_tail() -> None:
    policy = holding("a")
    policy.insert(slots("b"))
    policy.insert(slots("c"))
    policy.regroup(slots("cba"))
    assert evicted(policy, 2) == "cb"
