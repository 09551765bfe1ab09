"""Exclusive caching pays where the GPU's blocks besides would keep what is used again."""

from __future__ import annotations

import random

import pytest

from kvoffload_patch.tier.gain import ExclusiveGain
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies import POLICIES
from kvoffload_patch.tier.recency_model import sample_marks
from kvoffload_patch.tier.tuning import MODEL_BLOCKS, MODEL_LEAD_PARTS, RECOMPUTE_TIMES


def go_round(gain: ExclusiveGain, keys: int, times: int, slots: int) -> None:
    """Prompts of eight blocks take turns; a tier of so many slots has those used last."""
    held: dict[str, None] = {}
    for turn in range(times * keys // 8):
        prompt = [f"{(8 * turn + block) % keys}" for block in range(8)]
        gain.loaded([key for key in prompt if key in held])
        gain.computed([key for key in prompt if key not in held])
        for key in prompt:
            held.pop(key, None)
            held[key] = None
        for key in list(held)[: max(0, len(held) - slots)]:
            del held[key]


def test_what_fits_in_both_together_and_not_in_the_tier_pays() -> None:
    gain = ExclusiveGain(64, 32)
    assert not gain.pays
    go_round(gain, keys=80, times=3, slots=64)
    assert gain.pays


def test_what_fits_in_the_tier_or_not_even_in_both_does_not_pay() -> None:
    for keys in (56, 200):
        gain = ExclusiveGain(64, 32)
        go_round(gain, keys, times=6, slots=64)
        assert not gain.pays, keys


def test_it_ends_with_the_load_that_it_paid_for() -> None:
    gain = ExclusiveGain(64, 32)
    go_round(gain, keys=80, times=3, slots=64)
    go_round(gain, keys=56, times=3, slots=96)
    assert gain.pays, "not at once"
    go_round(gain, keys=56, times=20, slots=96)
    assert not gain.pays


def test_it_begins_when_the_gain_is_clear_and_ends_below_half_of_the_cost() -> None:
    """Between these it stays as it is, so that it does not come and go."""
    gain = ExclusiveGain(MODEL_LEAD_PARTS, 100)  # clear: one block more than what it costs
    gain.computed([f"{n}" for n in range(MODEL_LEAD_PARTS)])
    gain.computed(["more", "most"])  # two of the first left the tier, and are still on the GPU
    gain.loaded(["0"])
    assert gain._lead == 1 and not gain.pays, "it costs something, too"
    gain.loaded(["1"])
    assert gain.pays
    while gain.pays:
        before = gain._lead, gain._loaded / RECOMPUTE_TIMES
        gain.loaded(["0"])
    lead, cost = before
    assert 0.4 * cost < lead < 0.6 * cost


def test_a_prompt_that_is_much_longer_than_the_tier_turns_nothing_round() -> None:
    gain = ExclusiveGain(4, 4)
    gain.computed("abcd")
    for _ in range(100):
        gain.loaded("abcd")
    gain.computed([f"{n}" for n in range(1000)])
    assert not gain.pays


def test_a_tier_without_slots_can_be_told_of_what_is_computed() -> None:
    gain = ExclusiveGain(0, 4)
    gain.computed("ab")
    assert not gain.pays


def test_little_gain_for_many_loads_does_not_pay() -> None:
    """One block that only both together would keep, for so many loads of others."""
    for often, pays in ((RECOMPUTE_TIMES // 4, True), (4 * RECOMPUTE_TIMES, False)):
        gain = ExclusiveGain(64, 32)
        often_used = [f"often-{n}" for n in range(8)]
        gain.computed(often_used)
        for turn in range(400):
            gain.computed([f"seldom-{turn % 80}"])
            for n in range(often):
                gain.loaded([often_used[n % 8]])
        assert gain.pays is pays, often


def test_what_the_gpu_has_used_lately_is_kept_longer() -> None:
    gain, other = ExclusiveGain(8, 4), ExclusiveGain(8, 4)
    for one in (gain, other):
        one.computed("abcdefgh")
    gain.hit_on_gpu("abcd")
    for one in (gain, other):
        one.computed("ij")
        one.loaded("abcd")
    assert (gain._lead > 0, other._lead > 0) == (False, True), "a and b had left the tier"
    gain = ExclusiveGain(8, 4)
    gain.computed("abcdefgh")
    gain.hit_on_gpu("ab")
    gain.computed("ijklmnop")
    gain.loaded("ab")
    assert gain._lead > 0, "both together have them still"


def test_a_larger_tier_is_modelled_by_a_sample() -> None:
    rng = random.Random(0)
    gain = ExclusiveGain(16 * MODEL_BLOCKS, 8 * MODEL_BLOCKS)
    prompts = [[rng.randbytes(8) for _ in range(64)] for _ in range(20 * MODEL_BLOCKS // 64)]
    for _ in range(3):
        for prompt in prompts:
            gain.computed(prompt)
    assert gain.pays
    for prompt in prompts:
        gain.hit_on_gpu(prompt)
        gain.loaded(prompt)
    modelled = [*gain._inclusive.keys, *gain._exclusive.keys]
    assert all(sample_marks(modelled, gain._one_in))
    assert len([*gain._inclusive.keys]) <= MODEL_BLOCKS
    assert len([*gain._exclusive.keys]) <= 3 * MODEL_BLOCKS // 2


def test_a_tier_that_grows_goes_on_and_one_that_shrinks_begins_again() -> None:
    gain = ExclusiveGain(16, 32)
    go_round(gain, keys=40, times=2, slots=16)
    before = {*gain._inclusive.keys}
    gain.resize(64)
    assert before <= {*gain._inclusive.keys}
    go_round(gain, keys=80, times=3, slots=64)
    assert gain.pays and len({*gain._inclusive.keys}) == 64
    assert len({*gain._exclusive.keys}) == 80
    gain.resize(32)
    assert not [*gain._inclusive.keys] and gain.pays
    gain.resize(2 * MODEL_BLOCKS)
    assert gain._one_in == 2


@pytest.mark.parametrize("eviction", POLICIES)
def test_auto_makes_the_plans_of_eager_until_it_pays(eviction: str) -> None:
    """Prompts of some blocks come, are loaded and leave; all that is asked of both is the same."""
    rng, never = random.Random(eviction), ExclusiveGain(24, gpu_blocks=0)
    auto = OffloadManager(24, POLICIES[eviction], store="auto", gpu_blocks=12)
    auto._gain, eager = never, OffloadManager(24, POLICIES[eviction])
    for step in range(300):
        prompt = [f"{rng.randrange(12)}-{n}" for n in range(rng.randint(1, 5))]
        found = [key for key in prompt if eager.lookup(key)]
        blocks = rng.sample(range(40), len(prompt))
        missed = dict(zip([key for key in prompt if key not in found], blocks))
        plans = []
        for tier in (auto, eager):
            tier.note_new_blocks(blocks)
            tier.hit_on_gpu(blocks[:1], prompt[:1], lambda block, key: True)
            if found:
                tier.begin_load(found, blocks[-len(found) :])
            plans.append(tier.make_plan(lambda block, key: True, missed))
            tier.request_ended(prompt, together=step % 2 == 0)
            tier.apply(tier.drained())
        assert plans[0] == plans[1]
        assert not never.pays and not auto.lazy and not auto.looks_ahead
    assert eager.stats.evicted > 100 < eager.stats.loaded
