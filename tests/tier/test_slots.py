"""The slot pool against a plain set of taken slots: none held twice, runs joined, errors clean."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvoffload_patch.tier.slots import SlotPool


def free_runs(capacity: int, taken: set[int]) -> dict[int, int]:
    """The maximal runs of slots that are not taken, size by first slot."""
    runs: dict[int, int] = {}
    start = None
    for slot in range(capacity):
        if slot in taken:
            start = None
            continue
        start = slot if start is None else start
        runs[start] = slot - start + 1
    return runs


def free_in(pool: SlotPool) -> dict[int, int]:
    """The free runs that the pool knows, size by first slot."""
    return dict(pool._size_at_start)


def pieces(slots: Sequence[int]) -> list[tuple[int, int]]:
    """An allocation as runs of neighbours: (first slot, size)."""
    found: list[tuple[int, int]] = []
    for slot in slots:
        if found and slot == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((slot, 1))
    return found


class SlotPoolMachine(RuleBasedStateMachine):
    """`SlotPool` beside the set of slots that are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(0)
        self.taken: set[int] = set()

    @initialize(capacity=st.integers(0, 40), reserved=st.sets(st.integers(0, 39)))
    def start(self, capacity: int, reserved: set[int]) -> None:
        self.taken = {slot for slot in reserved if slot < capacity}
        self.pool = SlotPool(capacity, reserved=self.taken)

    @property
    def num_free(self) -> int:
        return self.pool.capacity - len(self.taken)

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.num_free))
        free = free_runs(self.pool.capacity, self.taken)
        slots = self.pool.allocate(count)
        assert len(slots) == len(set(slots)) == count
        assert not self.taken.intersection(slots)
        assert all(0 <= slot < self.pool.capacity for slot in slots)
        self._check_pieces(pieces(slots), free, count)
        self.taken.update(slots)

    def _check_pieces(self, taken: list[tuple[int, int]], free: dict[int, int], count: int) -> None:
        if count and count <= 1 << (max(free.values()).bit_length() - 1):
            assert len(taken) == 1, "a run of this size was there"
        for i, (start, size) in enumerate(taken):
            assert start in free, "a piece does not begin where a free run does"
            assert 2 * free[start] > max(free.values()), "a much larger run was there"
            if i < len(taken) - 1:
                assert free[start] == size, "a run was left before it was used up"
            del free[start]

    @rule(excess=st.integers(1, 3))
    def allocate_too_many(self, excess: int) -> None:
        with pytest.raises(ValueError, match="are free"):
            self.pool.allocate(self.num_free + excess)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.taken)), unique=True))
        self.pool.free(slots)
        self.taken.difference_update(slots)

    @rule(more=st.integers(0, 40))
    def grow(self, more: int) -> None:
        capacity = self.pool.capacity + more
        self.pool.grow(capacity)
        assert self.pool.capacity == capacity

    @rule(less=st.integers(1, 3))
    def grow_to_fewer(self, less: int) -> None:
        capacity = self.pool.capacity
        with pytest.raises(ValueError, match=f"expected at least {capacity} slots, got"):
            self.pool.grow(capacity - less)
        assert self.pool.capacity == capacity

    @rule(slots=st.lists(st.integers(-2, 42), min_size=1))
    def free_what_is_not_taken(self, slots: list[int]) -> None:
        if len(set(slots)) < len(slots) or not self.taken.issuperset(slots):
            with pytest.raises(ValueError, match="not all taken|there twice"):
                self.pool.free(slots)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free_twice_at_once(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.taken)))
        with pytest.raises(ValueError, match=f"slot {slot} is there twice"):
            self.pool.free([slot, slot])

    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        """Slots that are taken are gone, too: the one that has them does not give them back."""
        capacity = data.draw(st.integers(0, self.pool.capacity))
        self.pool.shrink(capacity)
        self.taken = {slot for slot in self.taken if slot < capacity}

    @rule(more=st.integers(0, 5), late=st.sets(st.integers(0, 45)))
    def grow_with_some_taken(self, more: int, late: set[int]) -> None:
        before = self.pool.capacity
        self.pool.grow(before + more, late)
        self.taken |= {slot for slot in late if before <= slot < before + more}

    @invariant()
    def free_slots_are_known_as_maximal_runs(self) -> None:
        assert free_in(self.pool) == free_runs(self.pool.capacity, self.taken)
        assert self.pool.num_free == self.num_free


SlotPoolMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestSlotPool = SlotPoolMachine.TestCase


def test_a_fresh_pool_gives_out_neighbours_in_ascending_order() -> None:
    pool = SlotPool(10)
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert pool.allocate(6) == [4, 5, 6, 7, 8, 9]
    assert pool.num_free == 0
    assert free_in(pool) == {}


@pytest.mark.parametrize("order", [(3, 4, 5), (5, 4, 3), (3, 5, 4), (4, 3, 5)])
def test_slots_that_come_back_are_joined_with_both_neighbours(order: tuple[int, ...]) -> None:
    pool = SlotPool(8)
    pool.allocate(8)
    for slot in order:
        pool.free([slot])
    assert free_in(pool) == {3: 3}
    assert pool.allocate(3) == [3, 4, 5]
    pool.free(order)
    assert free_in(pool) == {3: 3}


def test_a_scattered_pool_becomes_one_run_when_all_came_back() -> None:
    pool = SlotPool(64)
    pool.allocate(64)
    pool.free(range(0, 64, 2))
    assert len(free_in(pool)) == 32
    pool.free(range(63, 0, -2))
    assert free_in(pool) == {0: 64}
    assert pool.allocate(64) == list(range(64))


def test_a_large_allocation_avoids_small_holes() -> None:
    pool = SlotPool(32)
    pool.allocate(20)
    pool.free((9, 1, 5))
    assert pool.allocate(8) == list(range(20, 28))


def test_an_allocation_larger_than_every_run_takes_the_largest_first() -> None:
    pool = SlotPool(12, reserved=[2, 11])
    assert free_in(pool) == {0: 2, 3: 8}
    assert pool.allocate(10) == [3, 4, 5, 6, 7, 8, 9, 10, 0, 1]


def test_reserved_slots_are_taken_and_come_back_through_free() -> None:
    pool = SlotPool(4, reserved=[0, 3])
    assert pool.num_free == 2
    assert pool.allocate(2) == [1, 2]
    pool.free([3])
    pool.free([0])
    assert free_in(pool) == {0: 1, 3: 1}


def test_new_slots_join_the_free_ones_at_the_end() -> None:
    pool = SlotPool(4)
    pool.allocate(2)
    pool.grow(1000)
    assert free_in(pool) == {2: 998}
    assert pool.allocate(998) == list(range(2, 1000))
    pool.grow(1003)
    assert free_in(pool) == {1000: 3}
    assert pool.num_free == 3


def test_a_pool_grows_at_the_same_cost_whatever_is_added() -> None:
    def steps(added: int) -> int:
        pool, count = SlotPool(10), 0

        def trace(frame: object, event: str, arg: object) -> object:
            nonlocal count
            count += 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            pool.grow(10 + added)
        finally:
            sys.settrace(before)
        return count

    assert steps(10_000_000) < steps(10) + 200


def test_a_pool_without_slots_has_nothing_to_give() -> None:
    pool = SlotPool(0)
    assert pool.allocate(0) == []
    with pytest.raises(ValueError, match="0 are free"):
        pool.allocate(1)


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        SlotPool(-1)


def test_a_refused_allocation_takes_nothing() -> None:
    pool = SlotPool(4, reserved=[1])
    with pytest.raises(ValueError, match="4 slots asked for, 3 are free"):
        pool.allocate(4)
    assert free_in(pool) == {0: 1, 2: 2}
    assert sorted(pool.allocate(3)) == [0, 2, 3]


def test_a_slot_freed_twice_is_refused_and_nothing_beside_it_is_freed() -> None:
    pool = SlotPool(3)
    pool.allocate(3)
    pool.free([0])
    with pytest.raises(ValueError, match="slots 0 to 1 are not all taken"):
        pool.free([1, 0])
    assert free_in(pool) == {0: 1}
