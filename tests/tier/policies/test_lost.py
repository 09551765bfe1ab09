"""What is remembered of evicted keys, and for how long."""

from __future__ import annotations

import random

import pytest
from tier.steps import steps_of

from kvoffload_patch.tier.policies.lost import LostKeys


def test_each_list_is_counted_and_what_comes_back_is_forgotten() -> None:
    lost = LostKeys(2)
    lost.add("abc", 0, 10)
    lost.add("de", 1, 10)
    assert lost.counts == [3, 2]
    assert lost.forget("axd") == [1, 1]
    assert lost.counts == [2, 1] and lost.of("ab") == {"b"}


def test_nothing_is_found_where_none_is_remembered() -> None:
    lost = LostKeys(1)
    assert not lost.of("a")
    lost.add("a", 0, 10)
    assert not lost.of("bc") and lost.of("ba")


def test_whole_evictions_are_forgotten_beyond_the_limit_the_oldest_first() -> None:
    lost = LostKeys(1)
    for keys in ("abc", "de", "f", "", "g"):
        lost.add(keys, 0, 4)
    assert lost.of("abcdefg") == {*"defg"}
    assert lost.counts == [4]
    lost.add("hijkl", 0, 4)
    assert lost.counts == [0], "more than the limit at once"


def test_what_leaves_again_while_it_is_remembered_counts_once() -> None:
    lost = LostKeys(2)
    lost.add("ab", 0, 10)
    lost.add("bc", 1, 10)  # b was stored again by another way than that of what is computed
    assert lost.counts == [2, 1]
    assert lost.forget("abc") == [2, 1] and lost.counts == [0, 0]


def test_nothing_is_left_of_what_is_cleared() -> None:
    lost = LostKeys(2)
    lost.add("xy", 1, 10)
    lost.clear()
    assert lost.counts == [0, 0]
    lost.add("ab", 0, 2)
    assert lost.counts == [2, 0], "old evictions count no more"
    lost.add("cd", 0, 2)
    assert lost.of("abcd") == {*"cd"}, "nor are they what is forgotten first"


def test_evictions_of_nothing_take_no_memory() -> None:
    """As where nothing can be evicted, and each step asks."""
    lost = LostKeys(1)
    for _ in range(100):
        lost.add([], 0, 4)
    assert not lost._evictions


class OneByOne:
    """The rule as it is written: one key is looked at after the other."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.evictions: list[list[int]] = []

    def add(self, keys: list[int], which: int, limit: int) -> None:
        for key in keys:
            self.left.setdefault(key, which)
        self.evictions.append(keys)
        while sum(map(len, self.evictions)) > limit:
            self.forget(self.evictions.pop(0))

    def forget(self, keys: list[int]) -> list[int]:
        gone = [self.left.pop(key, None) for key in keys]
        return [gone.count(0), gone.count(1)]


@pytest.mark.parametrize("seed", range(20))
def test_keys_are_remembered_as_if_looked_at_one_by_one(seed: int) -> None:
    lost, model, rng = LostKeys(2), OneByOne(), random.Random(seed)
    for _ in range(300):
        some = rng.sample(range(40), rng.randrange(6))
        assert {*lost.of(some)} == {*some} & model.left.keys()
        if rng.randrange(3):
            which = rng.randrange(2)
            lost.add(some, which, 20)
            model.add(some, which, 20)
        else:
            assert lost.forget(some) == model.forget(some)
        assert lost.of(range(40)) == {*model.left}
        assert lost.counts == [[*model.left.values()].count(which) for which in range(2)]


def test_a_key_costs_no_bytecode() -> None:
    lost, keys = LostKeys(2), list(range(10_000))
    lost.add([-1], 1, 20_000)
    assert 0 < steps_of(lambda: lost.add(keys, 0, 20_000)) < 1000
    assert 0 < steps_of(lambda: lost.of(keys)) < 1000
    assert 0 < steps_of(lambda: lost.add(list(range(10_000, 20_000)), 0, 20_000)) < 1000
    assert lost.counts == [20_000, 0], "an eviction was forgotten"
    assert 0 < steps_of(lambda: lost.forget(keys)) < 1000
