"""What is new leaves first unless it is used in time; what comes back soon stays."""

from __future__ import annotations

import random

from kvoffload_patch.tier.policies.s3fifo import S3FifoPolicy

KEYS = [f"key-{number}" for number in range(20)]


def holding(*slots: int) -> S3FifoPolicy:
    policy = S3FifoPolicy(KEYS)
    policy.insert(slots)
    return policy


def test_what_was_not_used_leaves_in_the_order_in_which_it_came() -> None:
    policy = holding(3, 1, 2)
    assert list(policy.evict(2)) == [3, 1]
    assert list(policy.evict(2)) == [2]


def test_what_was_used_goes_round_again() -> None:
    policy = holding(*range(10))
    policy.hit([0, 1, 1, 19])
    assert list(policy.evict(6)) == [2, 3, 4, 5, 6, 7]
    assert list(policy.evict(9)) == [0, 1, 8, 9], "a tenth of the tier is for what is new"


def test_a_key_that_comes_back_soon_is_not_new() -> None:
    policy = holding(0, 1)
    assert list(policy.evict(1)) == [0]
    policy.miss([KEYS[0]])
    policy.insert([0, 2, 3])
    assert list(policy._small) == [1, 2, 3] and list(policy._main) == [0]
    assert list(policy.evict(3)) == [1, 0, 2]


def test_a_pinned_slot_stays_and_its_load_is_a_use() -> None:
    policy = holding(0, 1)
    policy.pin([0])
    assert list(policy.evict(2)) == [1]
    policy.unpin([0])
    policy.insert(range(2, 12))
    assert list(policy.evict(8)) == list(range(2, 10))
    policy.pin([0])
    policy.remove([0])
    policy.unpin([11])
    assert sorted(policy.evict(9)) == [10, 11]


def test_what_is_remembered_of_evictions_has_a_bound() -> None:
    policy, rng = S3FifoPolicy(KEYS), random.Random(0)
    for _ in range(2000):
        slot = rng.randrange(20)
        policy.remove([slot])
        policy.insert([slot])
        policy.evict(rng.randrange(3))
    assert len(policy._lost) <= 20 and len(policy._uses) <= 20 and not policy._pinned
