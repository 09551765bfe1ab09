"""S3-FIFO as its authors have it, but for blocks that are loaded."""

from __future__ import annotations

from scripts.simulate.tried import S3Fifo


def holding(number: int) -> S3Fifo:
    policy = S3Fifo([f"key {slot}" for slot in range(number)])
    policy.insert(list(range(number)))
    return policy


def test_what_was_not_used_in_the_small_queue_leaves_it() -> None:
    policy = holding(4)
    policy.hit([0, 2])
    assert policy.evict(2) == [1, 3]
    assert policy.evict(9) == [0, 2]
    assert policy.evict(1) == []


def test_what_comes_again_while_it_is_remembered_goes_to_the_main_queue() -> None:
    policy = holding(4)
    assert policy.evict(1) == [0]
    policy.insert([0])
    assert policy.evict(3) == [1, 2, 3], "the small queue is more than a tenth"
    assert policy.evict(1) == [0]


def test_a_block_of_the_main_queue_goes_round_as_often_as_it_was_used() -> None:
    policy = holding(20)
    policy.hit([0])
    policy.pin([1])
    policy.unpin([1])
    policy.hit([1, 1, 1, 1])
    assert policy.evict(17) == [*range(2, 18), 0], "1 went round, the last two are a tenth"
    assert policy.evict(3) == [1, 18, 19]


def test_pinned_and_removed_blocks_are_not_chosen() -> None:
    policy = holding(3)
    policy.pin([0])
    policy.remove([1])
    assert policy.evict(3) == [2]
