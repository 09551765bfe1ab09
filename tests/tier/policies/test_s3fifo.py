"""What is new leaves first unless it is used in time; what comes back soon stays."""

from __future__ import annotations

import random

import pytest

from kvoffload_patch.tier.policies import s3fifo
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


def test_where_too_many_were_used_the_oldest_leave_used_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3fifo, "ROUND_TIMES", 2)
    policy = holding(*range(6))
    policy.pin(range(6))
    policy.unpin(range(6))
    policy.hit(range(6))
    policy.pin([2])
    assert list(policy.evict(1)) == [3], "0 and 1 went round, and 2 is pinned"
    assert list(policy.evict(1)) == [0], "4 and 5 went round, and have one use left"
    assert not policy._uses[3] and not policy._uses[0], "of what takes these slots"
    assert sorted(policy.evict(6)) == [1, 4, 5]


def test_a_key_that_comes_back_soon_is_not_new() -> None:
    policy = holding(0, 1)
    assert list(policy.evict(1)) == [0]
    policy.miss([KEYS[0]])
    policy.insert([0, 2, 3])
    assert policy._queues.sizes == [3, 1]
    assert list(policy.evict(3)) == [1, 0, 2]


def test_a_pinned_slot_stays_and_its_load_is_a_use() -> None:
    policy = holding(0, 1)
    policy.pin([0])
    assert list(policy.evict(2)) == [1]
    policy.unpin([0])
    policy.insert(range(2, 12))
    assert list(policy.evict(8)) == list(range(2, 10))
    policy.pin([0, 11])
    policy.remove([0])
    policy.unpin([11])
    assert sorted(policy.evict(9)) == [10, 11]


def test_the_uses_of_what_was_removed_are_not_those_of_what_takes_its_slot() -> None:
    policy = holding(*range(10))
    policy.hit([0])
    policy.remove([0])
    assert policy._queues.sizes == [9, 0] and not any(policy._uses)
    policy.insert([0, 10, 11, 12])
    assert list(policy.evict(10)) == [*range(1, 10), 0]


def test_more_slots_can_come_of_which_none_was_used() -> None:
    keys = KEYS[:4]
    policy = S3FifoPolicy(keys)
    policy.insert(range(4))
    keys += KEYS[4:]
    policy.grow()
    policy.insert(range(4, 20))
    policy.hit([5])
    assert list(policy.evict(8)) == [0, 1, 2, 3, 4, 6, 7, 8]
    assert len(policy._uses) == len(policy._queues.batch_of) == 20


def test_a_key_that_came_back_once_is_new_the_next_time() -> None:
    policy = holding(0, 1)
    assert list(policy.evict(1)) == [0]
    policy.insert([0])
    assert list(policy.evict(1)) == [0], "there is room for what is new"
    policy.insert([0])
    assert policy._queues.sizes == [2, 0]


def test_what_is_remembered_of_evictions_has_a_bound() -> None:
    policy, rng = S3FifoPolicy(KEYS), random.Random(0)
    for _ in range(2000):
        slot = rng.randrange(20)
        policy.remove([slot])
        policy.insert([slot])
        policy.evict(rng.randrange(3))
        assert sum(policy._lost.counts) <= 20
    policy.evict(20)
    assert not any(policy._uses), "what is gone was not used"


class OneByOne:
    """The rule as it is written: one block is looked at after the other."""

    def __init__(self) -> None:
        self.small: list[int] = []
        self.main: list[int] = []
        self.uses: dict[int, int] = {}
        self.lost: list[str] = []

    def insert(self, slots: list[int]) -> None:
        for slot in slots:
            again = KEYS[slot] in self.lost
            (self.main if again else self.small).append(slot)
            self.lost = [key for key in self.lost if key != KEYS[slot]]
            self.uses[slot] = 0

    def hit(self, slots: list[int]) -> None:
        for slot in slots:
            if slot in self.small + self.main:
                self.uses[slot] = min(self.uses[slot] + 1, 3)

    def take(self, slots: list[int]) -> None:
        self.small = [slot for slot in self.small if slot not in slots]
        self.main = [slot for slot in self.main if slot not in slots]

    def unpin(self, slots: list[int]) -> None:
        self.main += slots
        self.uses.update((slot, min(self.uses[slot] + 1, 3)) for slot in slots)

    def evict(self, count: int) -> list[int]:
        evicted: list[int] = []
        rounds = s3fifo.ROUND_TIMES * count
        while len(evicted) < count and self.small + self.main:
            small = len(self.small) * 10 > len(KEYS) or not self.main
            slot = (self.small if small else self.main).pop(0)
            if self.uses[slot] and rounds:
                rounds -= 1
                self.uses[slot] = 0 if small else self.uses[slot] - 1
                self.main.append(slot)
                continue
            evicted.append(slot)
            if small:
                self.lost.append(KEYS[slot])
        return evicted


@pytest.mark.parametrize("rounds", [0, 1, 32])
@pytest.mark.parametrize("seed", range(20))
def test_blocks_leave_as_if_looked_at_one_by_one(
    seed: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3fifo, "ROUND_TIMES", rounds)
    policy, model, rng = S3FifoPolicy(KEYS), OneByOne(), random.Random(seed)
    free, pinned = set(range(20)), set[int]()
    for _ in range(400):
        there = sorted(set(range(20)) - free - pinned)
        some = rng.sample(range(20), 4)
        if what := [slot for slot in some if slot in free]:
            policy.insert(what)
            model.insert(what)
            free -= {*what}
        policy.hit(some)
        model.hit(some)
        loading = rng.sample(there, min(len(there), rng.randrange(3)))
        policy.pin(loading)
        model.take(loading)
        pinned |= {*loading}
        if rng.randrange(2):
            over = sorted(pinned)
            policy.unpin(over)
            model.unpin(over)
            pinned = set()
        count = rng.randrange(8)
        evicted = list(policy.evict(count))
        assert evicted == model.evict(count)
        free |= {*evicted}
        known = policy._lost.of(model.lost)  # whole evictions go
        model.lost = [key for key in model.lost if key in known]
