"""Lists of slots in the order of their use, beside plain Python lists that do the same."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tier.steps import steps_of

from kvoffload_patch.tier.policies.batches import BatchLists

SLOTS = 64


class Plain:
    """What `BatchLists` must do."""

    def __init__(self, lists: int) -> None:
        self.lists: list[list[int]] = [[] for _ in range(lists)]

    def add(self, which: int, slots: Sequence[int]) -> None:
        self.lists[which] += slots

    def take(self, slots: Sequence[int]) -> None:
        self.lists = [[s for s in each if s not in slots] for each in self.lists]

    def make_recent(self, slots: Sequence[int], which: int | None = None) -> None:
        for slot in reversed(dict.fromkeys(reversed(slots))):
            homes = [i for i, each in enumerate(self.lists) if slot in each]
            if homes:
                self.take([slot])
                self.add(homes[0] if which is None else which, [slot])

    def take_oldest(self, which: int, count: int) -> list[int]:
        taken = self.lists[which][:count]
        self.take(taken)
        return taken


def emptied(lists: BatchLists) -> list[list[int]]:
    return [lists.take_oldest(which, SLOTS) for which in range(len(lists.sizes))]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_random_uses(number: int, seed: int) -> None:
    rng = random.Random(seed)
    lists, plain = BatchLists(number, SLOTS), Plain(number)
    batches: list[list[int]] = []
    for _ in range(300):
        which = rng.randrange(number)
        free = [slot for slot in range(SLOTS) if not lists.batch_of[slot]]
        kind = rng.randrange(5)
        some = rng.sample(range(SLOTS), rng.randrange(1, 9))
        if kind == 0 and free:
            some = rng.sample(free, rng.randrange(1, 1 + min(9, len(free))))
            batches.append(some)
        elif batches and rng.random() < 0.6:  # whole batches, one after the other
            some = sum(rng.sample(batches, min(len(batches), rng.randrange(1, 4))), [])
        if kind == 0 and free:
            lists.add(which, some)
            plain.add(which, some)
        elif kind == 1:
            lists.take(some[:4])
            plain.take(some[:4])
        elif kind == 2:
            count = rng.randrange(6)
            assert lists.take_oldest(which, count) == plain.take_oldest(which, count)
        else:
            to = rng.choice([None, which])
            lists.make_recent(some, to)
            plain.make_recent(some, to)
        assert lists.sizes == [len(each) for each in plain.lists]
    assert emptied(lists) == plain.lists


@pytest.mark.parametrize("seed", range(20))
def test_the_oldest_of_all_lists_leave_in_the_order_of_their_use(seed: int) -> None:
    rng, lists, order = random.Random(seed), BatchLists(2, SLOTS), list[int]()
    for _ in range(300):
        which, count = rng.randrange(2), rng.randrange(9)
        its = [slot for slot in order if lists.batch_of[slot] % 2 == which]
        begin = rng.randrange(len(its) + 1)
        some = its[begin : begin + count]  # mostly of whole batches
        kind = rng.randrange(4)
        if kind == 0:
            some = rng.sample([*{*range(SLOTS)} - {*order}], min(count, SLOTS - len(order)))
            lists.add(which, some)
        elif kind == 1:
            lists.make_recent(some, rng.choice([None, 0, 1]))
        elif kind == 2:
            some = order[:count]
            assert lists.take_oldest_of_all(count) == some
        else:
            lists.take(some)
        order = [slot for slot in order if slot not in some] + (some if kind < 2 else [])
    assert lists.take_oldest_of_all(SLOTS) == order


def test_a_batch_that_is_used_as_a_whole_is_moved_as_one() -> None:
    lists = BatchLists(2, SLOTS)
    lists.add(0, [1, 2, 3])
    lists.add(0, [4])
    number = lists.batch_of[1]
    lists.make_recent([1, 2, 3])
    assert lists.batch_of[1] == number
    lists.make_recent([1, 2, 3], 1)
    assert lists.batch_of[1] % 2 == 1
    assert emptied(lists) == [[4], [1, 2, 3]]


def test_a_slot_that_is_there_twice_is_in_its_list_once() -> None:
    lists = BatchLists(1, SLOTS)
    lists.add(0, [1, 2])
    lists.make_recent([1, 1])
    assert lists.sizes == [2]
    lists.make_recent([1, 2, 1])
    assert emptied(lists) == [[2, 1]]


def test_more_slots_can_come() -> None:
    lists = BatchLists(1, 1)
    lists.add(0, [0])
    lists.grow(3)
    lists.add(0, [2])
    lists.make_recent([1, 0])
    assert lists.batch_of[1:2] == [0] and len(lists.batch_of) == 3
    assert emptied(lists) == [[2, 0]]


def test_a_list_of_slots_stays_its_callers() -> None:
    lists, slots = BatchLists(1, SLOTS), [1, 2]
    lists.add(0, slots)
    slots.clear()
    assert emptied(lists) == [[1, 2]]


def test_a_batch_whose_slots_are_used_elsewhere_does_not_keep_their_numbers() -> None:
    lists = BatchLists(1, 1000)
    lists.add(0, range(1000))
    for slot in range(999, 0, -1):
        lists.make_recent([slot])
    assert sum(len(batch.slots) for batch in lists._lists[0].values()) <= 1001


def test_the_oldest_of_a_large_batch_with_holes_take_no_more_steps_than_of_a_small_one() -> None:
    """A tier that was given another policy has one batch of all its blocks."""

    def most_steps(slots: int) -> int:
        lists, found = BatchLists(1, slots), []
        lists.add(0, range(slots))
        for at in range(10, 100, 10):  # one is loaded, then the oldest of the others leaves
            lists.take([slots - at])
            found.append(steps_of(lambda: lists.take_oldest(0, 1)))
        return max(found)

    assert most_steps(10_000) == most_steps(1000)


def test_a_batch_of_which_all_was_taken_is_gone() -> None:
    """Or each load would leave one until what is older than it has left the tier."""
    lists = BatchLists(1, SLOTS)
    for _ in range(100):
        lists.add(0, [1, 2])
        lists.take([2])
        lists.take([1])
    assert not lists._lists[0]


def test_what_is_used_again_as_a_whole_leaves_after_what_another_list_was_given_before() -> None:
    lists = BatchLists(2, SLOTS)
    lists.add(0, [1, 2])
    lists.add(1, [3])
    lists.make_recent([1, 2])
    lists.add(1, [4])
    assert lists.take_oldest_of_all(9) == [3, 1, 2, 4]


def test_nothing_is_no_batch() -> None:
    lists = BatchLists(1, SLOTS)
    for _ in range(100):
        lists.add(0, [])
    assert not lists._lists[0]
