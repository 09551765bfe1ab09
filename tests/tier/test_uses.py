"""Blocks that need several uses before they are stored, counted in bounded memory."""

from __future__ import annotations

import pytest
from tier.plans import store_of

from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies.lru import LRUPolicy
from kvoffload_patch.tier.tuning import TRACKED_TIMES
from kvoffload_patch.tier.uses import UseCounts


def make_tier(store: str = "eager", min_uses: int = 2) -> OffloadManager:
    return OffloadManager(4, LRUPolicy, store=store, min_uses=min_uses)


def step(tier: OffloadManager, **computed: int) -> list[int]:
    """A step computes these; returns the GPU blocks that it has stored."""
    plan = tier.make_plan(lambda block, key: True, computed)
    tier.apply(tier.drained())
    store = None if plan is None else store_of(plan)
    return [] if store is None else list(store.source_ids)


def test_what_is_computed_again_is_stored_then_and_the_first_time_is_counted() -> None:
    tier = make_tier()
    assert step(tier, a=0, b=1) == []
    assert tier.stats.not_stored["few_uses"] == 2
    assert step(tier, b=7, c=8) == [7]
    assert tier.stats.not_stored["few_uses"] == 3


def test_a_hit_on_the_gpu_is_a_use() -> None:
    tier = make_tier(min_uses=3)
    step(tier, a=0)
    tier.hit_on_gpu([0], ["a"], lambda block, key: True)
    assert step(tier) == []
    tier.hit_on_gpu([0], ["a"], lambda block, key: True)
    assert step(tier) == [0]


def test_what_was_used_once_is_not_stored_before_the_gpu_loses_it() -> None:
    tier = make_tier("lazy")
    step(tier, a=0, b=1)
    tier.hit_on_gpu([1], ["b"], lambda block, key: True)
    assert tier.leaving([0, 1], ["a", "b"]) == {"b": 1}
    assert tier.stats.not_stored["few_uses"] == 1


@pytest.mark.parametrize("store", ["eager", "auto"])
def test_one_use_is_enough_unless_more_are_asked_for(store: str) -> None:
    assert step(make_tier(store, min_uses=1), a=0) == [0]
    assert step(make_tier(store, min_uses=2), a=0) == []


def test_the_keys_that_were_used_longest_ago_are_forgotten() -> None:
    counts, slots = UseCounts(2), 100
    most = TRACKED_TIMES * slots
    counts.count(range(most), slots)
    counts.count([0, most], slots)
    assert len(counts._counts) == most
    counts.count([1, 2], slots)
    assert counts.enough({0: 10, 1: 11, 2: 12}) == {0: 10, 2: 12}, "the first use of 1 is forgotten"
