"""Recency, or ARC: which one evicts, and what the two models of the tier learn from."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from tier.policies.letters import Letters

from kvoffload_patch.tier.policies import adaptive
from kvoffload_patch.tier.policies.adaptive import AdaptivePolicy, ArcModel
from kvoffload_patch.tier.policies.arc import AGAIN, ArcPolicy
from kvoffload_patch.tier.policies.lru import LRUPolicy
from kvoffload_patch.tier.policy import EvictionPolicy
from kvoffload_patch.tier.tuning import MODEL_BLOCKS


def letters(slots: int) -> Letters[AdaptivePolicy]:
    return Letters(AdaptivePolicy, slots)


class Numbers:
    """A tier whose keys are numbers, each of a block that is a whole prompt."""

    def __init__(self, policy: type[EvictionPolicy], slots: int) -> None:
        self.key_of: list[int] = [-1] * slots
        self.policy = policy(self.key_of)
        self._slot_of: dict[int, int] = {}

    def ask(self, key: int) -> int:
        """Load a block, or compute it and store it; returns how many were computed."""
        if key in self._slot_of:
            slots = (self._slot_of[key],)
            self.policy.pin(slots)
            self.policy.unpin(slots)
            return 0
        self.policy.miss((key,))
        slot = len(self._slot_of)
        if slot == len(self.key_of):
            (slot,) = self.policy.evict(1)
            del self._slot_of[self.key_of[slot]]
        self.key_of[slot] = key
        self._slot_of[key] = slot
        self.policy.insert((slot,))
        return 1

    def ask_all(self, keys: Sequence[int]) -> int:
        return sum(map(self.ask, keys))


def favourites(count: int, seed: int = 0, hot: int = 40) -> Iterator[int]:
    """A few keys over and over, and as many that never come again."""
    rng = random.Random(seed)
    for number in range(count):
        yield rng.randrange(hot) if number % 2 else 1_000_000 * (seed + 1) + number


def test_what_was_used_least_recently_leaves_whether_once_or_often() -> None:
    tier = letters(8)
    tier.store("abcdefgh")
    tier.hit("ba")
    tier.hit("c")
    assert tier.store("ijkl") == "defg"
    assert tier.evict(6) == "hbacij"
    assert tier.evict(8) == "kl"


def test_what_is_used_as_a_whole_time_and_again_is_as_recent_as_its_last_use() -> None:
    tier = letters(8)
    tier.store("ab")
    tier.store("cd")
    tier.hit("ab")
    tier.store("ef")
    tier.hit("ab")
    assert tier.evict(4) == "cdef"


def test_prompts_that_never_come_again_are_given_up_once_that_is_seen_to_recompute_less() -> None:
    tier = Numbers(AdaptivePolicy, 64)
    keys = list(favourites(4000))
    tier.ask_all(keys)
    assert not tier.policy.by_recency
    later = list(favourites(2000, seed=1))
    recomputed = {"adaptive": tier.ask_all(later)}
    for name, policy in (("lru", LRUPolicy), ("arc", ArcPolicy)):
        other = Numbers(policy, 64)
        other.ask_all(keys)
        recomputed[name] = other.ask_all(later)
    assert recomputed["lru"] > 1.2 * recomputed["adaptive"]
    assert recomputed["adaptive"] < 1.05 * recomputed["arc"]


def test_what_takes_the_place_of_what_was_used_often_is_kept_if_it_fits() -> None:
    def recomputed(policy: type[EvictionPolicy]) -> int:
        tier = Numbers(policy, 100)
        for _ in range(5):
            tier.ask_all(range(40))
        tier.ask_all(range(1000, 1090))
        return tier.ask_all(range(1000, 1090))

    assert recomputed(AdaptivePolicy) == 0 == recomputed(LRUPolicy)
    assert recomputed(ArcPolicy) > 20


def test_recency_comes_back_when_it_recomputes_less() -> None:
    tier = Numbers(AdaptivePolicy, 64)
    tier.ask_all(list(favourites(4000)))
    assert not tier.policy.by_recency
    tier.policy._lost.add([5], 0, 9)  # as if it had just been evicted
    for _ in range(40):  # more than ARC has learnt to give to what was not used again
        tier.ask_all(range(2000, 2062))
    assert tier.policy.by_recency
    assert not any(tier.policy._lost.counts), "recency remembers no evictions"


def test_recency_comes_back_where_both_are_alike_so_that_no_policy_is_stuck_in_its_past() -> None:
    tier = Numbers(AdaptivePolicy, 64)
    stuck = Numbers(ArcPolicy, 64)
    for one in (tier, stuck):
        one.ask_all(list(favourites(4000)))
        for key in range(2000, 6000):  # each comes again once, when 30 others have come
            one.ask_all((key, key - 30))
    later = [some for key in range(6000, 7000) for some in (key, key - 30)]
    assert (tier.ask_all(later), stuck.ask_all(later)) == (1000, 2000)


def test_the_share_of_what_is_used_once_comes_from_the_model() -> None:
    tier = Numbers(AdaptivePolicy, 4096)
    assert tier.policy._one_in == 4096 // MODEL_BLOCKS == 4
    tier.policy._arc_model.policy.share = 100.0
    tier.policy._count([1])
    assert tier.policy.share == 400.0
    tier.policy.by_recency = False
    tier.policy._lost.add([7], 0, 9)
    tier.policy.miss([7])
    assert 7 in tier.policy._came_back
    assert tier.policy.share == 400.0, "what it loses itself changes nothing"


def test_a_sample_of_a_large_tier_is_as_good() -> None:
    tier = Numbers(AdaptivePolicy, 4 * MODEL_BLOCKS)
    hot = 2 * MODEL_BLOCKS
    tier.ask_all(list(favourites(40_000, hot=hot)))
    assert not tier.policy.by_recency
    assert tier.policy._lru_model.slots == MODEL_BLOCKS
    tier.policy.hit(range(4 * MODEL_BLOCKS))
    known = {*tier.policy._lru_model.keys, *tier.policy._arc_model.keys}
    assert known and not any(hash(key) % 4 for key in known)


def test_what_arc_remembers_is_kept_while_it_leads() -> None:
    tier = Numbers(AdaptivePolicy, 64)
    tier.ask_all(list(favourites(4000)))
    assert not tier.policy.by_recency
    tier.policy._lost.add([5], 0, 9)
    tier.policy._count([1])
    assert not tier.policy.by_recency and tier.policy._lost.of([5])


def test_what_is_hit_on_the_gpu_is_used_but_proves_nothing() -> None:
    tier = letters(4)
    tier.store("abcd")
    tier.policy._tell_stored()
    before = tier.policy._lead
    tier.policy._lru_model.use(["w", "x", "y", "z"])  # it has none of the others any more
    tier.hit("a")
    assert tier.policy._lead == before
    assert "a" in tier.policy._lru_model.keys
    assert tier.policy._arc_model.policy._lists.sizes == [3, 1], "there it was used again"
    tier.policy.pin(tier.slots("b"))
    assert tier.policy._lead != before, "a load is one that a tier without it recomputes"


def test_what_has_ended_is_together_here_and_in_the_models() -> None:
    tier = letters(4)
    tier.store("ab")
    tier.store("c")
    tier.ended("cba")
    assert tier.store("xyz") == "cb"
    tier.policy._tell_stored()
    for model in (tier.policy._lru_model, tier.policy._arc_model):
        assert "a" in model.keys and "b" not in model.keys


def test_what_a_model_has_lost_by_the_end_of_its_request_is_passed_over() -> None:
    model = ArcModel(2)
    assert model.use("abc") == 3
    assert {*model.keys} == {"b", "c"}
    model.ended("cba")
    assert model.use("d") == 1 and {*model.keys} == {"b", "d"}, "its tail has left"


def test_the_model_of_arc_learns_from_what_it_computes_again() -> None:
    model = ArcModel(9)
    model.use("abcdefghi")
    model.use("jk")
    assert model.policy.share == 9 / 8
    assert model.use("a") == 1, "what it has lost last"
    assert model.policy.share > 2 and model.policy._lists.sizes[AGAIN] == 1


def test_the_models_lose_the_tail_of_what_was_stored_together_first() -> None:
    tier = letters(4)
    tier.store("abcd")
    tier.policy._tell_stored()
    assert tier.store("x") == "a"
    tier.policy._tell_stored()
    assert {*tier.policy._lru_model.keys} == {*tier.policy._arc_model.keys} == {*"bcdx"}


def test_a_prompt_that_is_much_longer_than_the_tier_turns_nothing_round() -> None:
    policy = letters(4).policy
    policy._lead = -100.0  # recency was much better lately
    policy._count(range(1000))
    assert policy.by_recency


@pytest.mark.parametrize("by_recency", [True, False])
def test_a_small_lead_changes_nothing(by_recency: bool) -> None:
    policy = letters(200).policy  # a lead of 1 turns it to ARC, and one below 0.1 back
    policy.by_recency, policy._lead = by_recency, 0.5
    policy._count(["a"])
    assert policy.by_recency == by_recency


def test_old_counts_fade_to_a_third_over_several_keys_for_each_slot() -> None:
    policy = letters(64).policy
    policy._lead = 100.0
    for key in range(adaptive.MODEL_MEMORY_TIMES * 64):
        policy._count([key])  # both models miss it
    assert 33 < policy._lead < 40


def test_what_no_model_has_is_forgotten_once_that_is_much() -> None:
    policy = letters(64).policy
    policy._lru_model.use(["a"])
    policy._arc_model.use(["b"])
    policy._known.update(range(adaptive.MODEL_MEMORY_TIMES * 64))
    policy._count(["c"])
    assert len(policy._known) == adaptive.MODEL_MEMORY_TIMES * 64, "models are walked seldom"
    policy._known.add("d")
    policy._count(["c"])
    assert policy._known == {"a", "b", "c"}, "what one of them has is known"


@pytest.mark.parametrize("slots", [1, 3, 64, 5000])
def test_what_is_remembered_is_bounded(slots: int) -> None:
    tier = Numbers(AdaptivePolicy, slots)
    for key in range(20_000):
        tier.ask(key)
    policy = tier.policy
    modelled = policy._lru_model.slots
    assert modelled == max(1, slots // policy._one_in) <= MODEL_BLOCKS
    assert len(policy._known) <= adaptive.MODEL_MEMORY_TIMES * modelled + len(policy._stored) + 1
    assert len(policy._stored) < adaptive.MODEL_BATCH_BLOCKS


def test_models_grow_with_the_tier_and_begin_again_where_the_sample_changes() -> None:
    tier = Numbers(AdaptivePolicy, 600)
    tier.ask_all(range(600))
    tier.policy._tell_stored()
    tier.key_of += [-1] * 400
    tier.policy.grow()
    assert len(tier.policy._arc_model._key_of) == tier.policy._lru_model.slots == 1000
    assert len([*tier.policy._arc_model.keys]) == 600
    tier.ask_all(range(600, 1000))
    tier.policy._tell_stored()
    assert len([*tier.policy._arc_model.keys]) == 1000
    tier.key_of += [-1] * 1000
    tier.policy.grow()
    assert tier.policy._one_in == 2 and len(tier.policy._arc_model._key_of) == 1000
    assert not [*tier.policy._arc_model.keys]


def test_a_tier_without_slots_can_be_told_of_misses() -> None:
    policy = AdaptivePolicy([])
    policy.miss(["a"] * 100)
    assert list(policy.evict(3)) == []
