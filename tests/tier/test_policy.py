"""Least recently used first; what is pinned stays, and what left is not chosen."""

from __future__ import annotations

import random

from kvoffload_patch.tier.policy import LRUPolicy

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


def test_a_batch_whose_slots_are_used_elsewhere_does_not_keep_their_numbers() -> None:
    policy = LRUPolicy([None] * 1000)
    policy.insert(range(1000))
    for slot in range(1, 1000):
        policy.hit([slot])
    assert sum(len(batch.slots) for batch in policy._batches.values()) <= 2 * 1000
