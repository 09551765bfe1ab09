"""The tail of a prefix leaves before its head with every policy, even one that wants otherwise."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import chain, takewhile
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from tier.long_tail import head_first, store
from tier.prefix_machine import PrefixMachine, busy
from tier.steps import steps_of

from kvoffload_patch.tier import prefixes
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies import POLICIES
from kvoffload_patch.tier.policies.arc import ArcPolicy
from kvoffload_patch.tier.policies.lru import LRUPolicy
from kvoffload_patch.tier.policy import EvictionPolicy
from kvoffload_patch.tier.prefixes import PrefixOrder


class NewestFirst(LRUPolicy):
    """Gives up what was used last, which is a head as a rule."""

    def evict(self, count: int) -> list[int]:
        in_order = super().evict(len(self._key_of))
        kept = max(0, len(in_order) - count)
        self.insert(in_order[:kept])
        return in_order[kept:][::-1]


ALL: dict[str, Callable[[Sequence[Hashable]], EvictionPolicy]] = {**POLICIES, "newest": NewestFirst}


def machine_of(name: str, window: int) -> Any:
    return type(name, (PrefixMachine,), {"policy": ALL[name], "window": window})


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("name", ALL)
def test_many_requests_that_share_beginnings(name: str, window: int) -> None:
    for seed in range(40):
        busy(machine_of(name, window)(), seed, steps=250)


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("name", ALL)
def test_random_requests(name: str, window: int) -> None:
    run_state_machine_as_test(
        machine_of(name, window),
        settings=settings(max_examples=80, stateful_step_count=40, deadline=None),
    )


def order_of(slots: int, busy: Collection[int] = ()) -> PrefixOrder:
    """Slots that came one by one, the first of them first, with a policy that asks for nothing."""
    key_of = [f"key {slot}" for slot in range(slots)]
    order = PrefixOrder(
        LRUPolicy(key_of),
        key_of,
        lambda slot: slot not in busy,
        lambda slots: len(set(busy).intersection(slots)),
    )
    for slot in range(slots):
        if slot not in busy:
            order.insert([slot])
    return order


def test_what_is_due_leaves_from_its_tail_and_comes_back_if_it_is_used() -> None:
    order = order_of(6)
    order.ended([[0, 1, 2]], together=False)
    assert list(order.evict(1)) == [2], "0 is the oldest, and 2 rests on it"
    order.hit([1, 0])
    assert list(order.evict(3)) == [3, 4, 5]
    assert list(order.evict(3)) == [1, 0]


def test_where_prefixes_part_all_branches_leave_first() -> None:
    order = order_of(6)
    for branch in ([0, 1], [0, 2], [0, 3, 4]):
        order.ended([branch], together=False)
    order.policy.hit([1])  # as if only this were used
    chosen = list(order.evict(5))
    assert set(chosen) == {0, 1, 2, 3, 4} and chosen[-1] == 0
    assert chosen.index(4) < chosen.index(3)


def test_what_is_pinned_holds_what_it_rests_on_and_nothing_else() -> None:
    busy = {2}
    order = order_of(5, busy)
    order.ended([[0, 1, 2]], together=False)
    assert list(order.evict(9)) == [3, 4]
    busy.clear()
    order.insert([2])
    assert [*order.evict(1), *order.evict(1), *order.evict(1)] == [2, 1, 0]


def test_what_is_forgotten_while_it_is_written_is_no_tail() -> None:
    busy = {1}
    order = order_of(2, busy)
    order.ended([[0, 1]], together=False)
    order.forget([1])
    busy.clear()  # it belongs to nobody
    assert list(order.evict(2)) == [0]


def test_what_rests_on_a_block_that_was_forgotten_rests_on_nothing() -> None:
    order = order_of(3)
    order.ended([[0, 1, 2]], together=False)
    order.remove([1])
    order.insert([1])  # another key
    order.ended([[1]], together=False)
    assert list(order.evict(1)) == [0]


def test_prefixes_that_say_the_contrary_of_each_other_come_to_an_end() -> None:
    order = order_of(4)
    for prefix in ([0, 1, 2], [2, 1, 0], [1, 2], [0, 2, 1]):
        order.ended([prefix], together=False)
    assert sorted(order.evict(4)) == [0, 1, 2, 3]


def test_what_its_head_is_missing_for_leaves_next_in_the_order_of_prefixes() -> None:
    order = order_of(5)
    order.hit([4, 3])
    order.orphaned([4, 3])
    assert list(order.evict(3)) == [4, 3, 0]
    order.orphaned([2, 1])
    order.hit([1])
    assert list(order.evict(2)) == [2, 1]


def test_another_policy_is_given_all_that_can_leave() -> None:
    order = order_of(4)
    order.ended([[0, 1, 2, 3]], together=False)
    order.evict(1)
    assert sorted(in_order := order.take_all()) == [0, 1, 2]
    order.policy = LRUPolicy(order._key_of)
    order.insert(in_order)
    assert [*order.evict(1), *order.evict(1), *order.evict(1)] == [2, 1, 0]


def test_slots_that_become_usable_later_have_their_place_in_prefixes() -> None:
    order = order_of(1)
    cast("list[str]", order._key_of).extend(["more"] * 3)
    order.grow()
    order.insert([1, 2, 3])
    order.ended([range(4)], together=False)
    assert [*order.evict(1), *order.evict(1), *order.evict(1)] == [3, 2, 1]
    assert len(order._before) == len(order._behind) == len(order._numbers) == 4


def test_the_policy_is_told_what_is_missing() -> None:
    key_of = [f"key {slot}" for slot in range(9)]
    policy = ArcPolicy(key_of)
    order = PrefixOrder(policy, key_of, lambda slot: True, lambda slots: 0)
    order.insert(range(9))
    assert list(order.evict(1)) == [0]
    order.miss(["key 0"])
    assert policy.share > 9 / 8, "more for what was used once"


def test_what_was_due_before_all_was_taken_is_not_what_leaves_next() -> None:
    order = order_of(6)
    order.ended([[0, 1, 2]], together=False)
    order.ended([[3, 4]], together=False)
    assert list(order.evict(1)) == [2]
    assert sorted(order.take_all()) == [0, 1, 3, 4, 5]
    order.policy = LRUPolicy(order._key_of)
    order.insert([3, 4, 0, 1, 5])
    assert list(order.evict(1)) == [4]


def test_what_was_due_and_is_used_again_is_not_what_leaves_next() -> None:
    order = order_of(6)
    order.ended([[0, 1, 2]], together=False)
    order.ended([[3, 4]], together=False)
    assert list(order.evict(1)) == [2]
    order.hit([1, 0])
    assert list(order.evict(1)) == [4]


@pytest.mark.parametrize(
    "prefixes",
    [
        [[0, 3]], [[0, 5]], [[4, 5]], [[3, 1]], [[0, 2], [0, 4], [0, 5]], [[0, 4], [0, 5], [0, 2]],
        [[0, 3], [0, 2]],
    ],
)  # fmt: skip
def test_what_is_left_of_fewer_slots_rests_on_nothing_that_is_gone(
    prefixes: list[list[int]],
) -> None:
    order = order_of(6)
    for prefix in prefixes:
        order.ended([[slot] for slot in prefix], together=False)
    assert sorted(order.take_all()) == [0, 1, 2, 3, 4, 5]
    key_of = cast("list[str]", order._key_of)
    del key_of[3:]
    order.policy = LRUPolicy(key_of)
    order.shrink(3)
    order.insert([1, 2, 0])
    first = [2] if [0, 2] in prefixes else [0]
    assert list(order.evict(1)) == [1]
    order.hit([2])
    assert list(order.evict(1)) == first, "what 0 rested on, or what rested on 0, is gone"
    assert sorted(order.evict(9)) == sorted({0, 2} - {*first})


def test_neighbours_among_fewer_slots_rest_on_each_other() -> None:
    order = order_of(6)
    order.take_all()
    key_of = cast("list[str]", order._key_of)
    del key_of[3:]
    order.policy = LRUPolicy(key_of)
    order.shrink(3)
    order.insert([0, 1, 2])
    order.ended([range(3)], together=False)
    assert [*order.evict(1), *order.evict(1), *order.evict(1)] == [2, 1, 0]


@pytest.mark.parametrize(("head", "tail"), [(3, 1), (5, 1), (1, 3), (1, 4), (4, 5)])
def test_slots_that_are_given_up_and_come_again_are_linked_again(head: int, tail: int) -> None:
    order = order_of(6)
    order.ended([[head], [tail]], together=False)
    order.take_all()
    key_of = cast("list[str]", order._key_of)
    del key_of[3:]
    order.policy = LRUPolicy(key_of)
    order.shrink(3)
    key_of += ["more"] * 3
    order.grow()
    order.insert([head, tail])
    order.ended([[head], [tail]], together=False)
    assert list(order.evict(1)) == [tail]


def test_what_is_due_stays_with_a_request_that_used_it_and_ends() -> None:
    order = order_of(6)
    order.ended([[0, 1, 2]], together=False)
    assert list(order.evict(1)) == [2]
    order.ended([[0, 1]], together=True)
    assert list(order.evict(3)) == [3, 4, 5]


def test_what_has_ended_is_told_to_the_policy_together_its_head_last() -> None:
    order = order_of(5)
    order.ended([range(2), [3, 2]], together=True)
    assert order.take_all() == [4, 2, 3, 1, 0]


def test_a_run_that_is_used_again_keeps_what_parts_from_it() -> None:
    order = order_of(8)
    for pieces in ([range(4)], [range(2), range(5, 7)], [range(4)], [range(5)]):
        order.ended(pieces, together=False)
    order.policy.hit([5, 6])  # as if only these were used
    assert {*order.evict(7)} == {0, 1, 2, 3, 4, 5, 6}


def test_a_run_of_new_blocks_keeps_what_rests_on_its_first() -> None:
    order = order_of(8)
    for pieces in ([[0], [5]], [range(4)]):
        order.ended(pieces, together=False)
    order.policy.hit([5])  # as if only this were used
    assert {*order.evict(5)} == {0, 1, 2, 3, 5}


def test_a_prefix_that_begins_within_another_one_leaves_the_last_slot_what_it_has() -> None:
    order = order_of(4)
    for prefix in ([2, 0], [3, 1], [0]):
        order.ended([prefix], together=False)
    order.hit([0, 1, 2])
    assert list(order.evict(1)) == [1], "3 is the oldest"


@pytest.mark.parametrize("prefix", [range(20), range(0, 40, 2)])
def test_what_left_as_a_whole_rests_on_nothing_when_its_slots_hold_others(prefix: range) -> None:
    order = order_of(40)
    order.ended([prefix if prefix.step == 1 else [*prefix]], together=True)
    order.hit([slot for slot in range(40) if slot not in prefix])
    assert sorted(order.evict(20)) == [*prefix]
    order.hit([slot for slot in range(40) if slot not in prefix])
    order.evict(20)
    order.insert([*prefix])
    assert list(order.evict(1)) == [0]


@pytest.mark.parametrize("name", POLICIES)
def test_a_block_costs_the_same_however_many_there_are(name: str) -> None:
    """In lines that run, where a prefix of 500 comes in two steps and another one leaves."""
    few, many = (lines_a_block(name, slots) for slots in (1000, 100_000))
    assert many < 1.5 * few + 1, (few, many)


def lines_a_block(name: str, slots: int) -> float:
    """Python lines for each block that is stored into a full tier of so many."""
    tier = OffloadManager(slots, ALL[name])
    prefixes = [[f"{n} {place}" for place in range(500)] for n in range(slots // 500 + 4)]

    def store(prefix: list[str]) -> None:
        for part in (prefix[:250], prefix[250:]):
            tier.make_plan(lambda block, key: True, dict(zip(part, range(1, 251))))
            tier.apply(tier.drained())
        tier.request_ended(prefix)

    for prefix in prefixes[:-4]:
        store(prefix)
    lines = 0

    def count(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        for prefix in prefixes[-4:]:
            store(prefix)
    finally:
        sys.settrace(before)
    assert tier.num_used == slots
    return lines / 2000


@pytest.mark.parametrize("sizes", [[], [1], [40], [8, 9, 30], [1, 100], [100, 1], [3, 1, 90, 2]])
def test_slots_are_told_as_runs_of_neighbours(sizes: list[int]) -> None:
    runs, begin = [], 5
    for size in sizes:
        runs.append(range(begin, begin + size))
        begin += size + 3
    assert prefixes.runs_of(list(chain.from_iterable(runs))) == runs


def test_many_short_runs_are_told_as_none() -> None:
    assert prefixes.runs_of(range(0, 64, 2)) == []
    assert prefixes.runs_of([0, 1, 3, 4, 6, 7, 9, 10, *range(20, 36)]) == []


class Asked:
    """Requests of long prompts that share beginnings, over slots in pieces of many sizes.

    Args:
        in_runs: whether the order is told of pieces that are neighbours.
    """

    def __init__(self, in_runs: bool) -> None:
        key_of = [f"key {slot}" for slot in range(400)]
        self.order = PrefixOrder(LRUPolicy(key_of), key_of, lambda slot: True, lambda slots: 0)
        self.in_runs = in_runs
        self.free = list(range(400))
        self.prompts: list[list[int]] = []

    def ask(self, rng: random.Random) -> list[int]:
        """One request computes some blocks behind a prefix; returns what leaves for them."""
        shared: list[int] = []
        if self.prompts and rng.random() < 0.5:
            shared = rng.choice(self.prompts)
            shared = shared[: rng.randrange(1, len(shared) + 1)]
        self.order.hit(shared[::-1])
        count, evicted = rng.choice([1, 3, 20, 70, 90]), list[int]()
        if count > len(self.free):
            evicted = list(self.order.evict(count - len(self.free)))
            self.free += evicted
        gone = set(evicted)
        whole = [[slot for slot in prompt if slot not in gone] for prompt in self.prompts]
        self.prompts = [prompt for prompt in whole if prompt]
        new = sorted(self.free[-count:])
        del self.free[-count:]
        self.order.insert(new[::-1])
        kept = list(takewhile(lambda slot: slot not in gone, shared))
        self.end([*kept, *new])
        return evicted

    def end(self, prompt: list[int]) -> None:
        """A request has ended."""
        self.prompts.append(prompt)
        pieces: list[Sequence[int]] = [[slot] for slot in prompt]
        if self.in_runs:
            pieces = []
            for slot in prompt:
                last = pieces[-1] if pieces else range(0)
                if last and last[-1] + 1 == slot:
                    pieces[-1] = range(last[0], slot + 1)
                else:
                    pieces.append(range(slot, slot + 1))
        self.order.ended(pieces, together=len(prompt) % 2 == 0)


@pytest.mark.parametrize("seed", range(12))
def test_runs_of_neighbours_leave_as_the_same_blocks_one_by_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, plain = Asked(in_runs=True), Asked(in_runs=False)
    one, other = random.Random(seed), random.Random(seed)
    found: list[list[int]] = [[], []]
    for _ in range(150):
        found[0] += sorted(quick.ask(one))
        with monkeypatch.context() as patch:
            patch.setattr(prefixes, "runs_of", lambda slots: [])
            found[1] += sorted(plain.ask(other))
    assert found[0] == found[1] and found[0]
    heads = [[o.order._before[t] for t in range(400)] for o in (quick, plain)]
    valid = [
        [h if h >= 0 and h not in o.free and t not in o.free else None for t, h in enumerate(hs)]
        for o, hs in zip((quick, plain), heads)
    ]
    assert valid[0] == valid[1] and any(valid[0])


def test_a_block_that_rests_on_itself_ends_the_search_for_a_tail() -> None:
    """Such an order is a fault of those who tell it, by which a step must not hang."""
    order = order_of(4)
    order.ended([[1, 2, 1]], together=False)
    assert order.evict(1) == [0]
    with pytest.raises(RuntimeError, match="the block in slot . rests on itself"):
        order.evict(1)


def test_the_tail_of_a_head_that_leaves_is_looked_for_once() -> None:
    """However long it is; the steps behind that find it at once."""
    short, long = head_first(20), head_first(2000)
    for tier in (short, long):
        store(tier, -1)
        assert tier.holds(0) and not tier.holds(tier.num_slots - 1)
    assert steps_of(lambda: store(long, -2)) == steps_of(lambda: store(short, -2))
