"""The model in small has what a tier with `LRUPolicy` would have."""

from __future__ import annotations

import random
from collections.abc import Collection, Hashable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies.adaptive import AdaptivePolicy, ArcModel
from kvoffload_patch.tier.policies.arc import ArcPolicy
from kvoffload_patch.tier.policies.lru import LRUPolicy
from kvoffload_patch.tier.recency_model import (
    KeySample,
    RecencyModel,
    sample_marks,
    sample_of,
    sampled,
)
from kvoffload_patch.tier.tuning import MODEL_BLOCKS


class Tier:
    """Slots that a policy orders; what is missing is stored behind what is there."""

    def __init__(self, slots: int, policy: type[LRUPolicy | ArcPolicy]) -> None:
        self.key_of: list[object] = [None] * slots
        self.slot_of: dict[object, int] = {}
        self.policy = policy(self.key_of)

    def use(self, keys: list[str]) -> int:
        missing = [key for key in dict.fromkeys(keys) if key not in self.slot_of]
        self.policy.hit([self.slot_of[key] for key in keys if key in self.slot_of])
        stored = missing[-len(self.key_of) :]
        self.policy.miss(stored)
        used = len(self.slot_of)
        slots = [*range(used, min(used + len(stored), len(self.key_of)))]
        for slot in self.policy.evict(len(stored) - len(slots)):
            del self.slot_of[self.key_of[slot]]
            slots.append(slot)
        for key, slot in zip(stored, slots):
            self.key_of[slot], self.slot_of[key] = key, slot
        self.policy.insert(slots)
        return len(missing)

    def grow(self, slots: int) -> None:
        self.key_of += [None] * (slots - len(self.key_of))
        self.policy.grow()


MODELS: dict[type, type[RecencyModel | ArcModel]] = {LRUPolicy: RecencyModel, ArcPolicy: ArcModel}


def grow(model: RecencyModel | ArcModel, slots: int) -> None:
    if isinstance(model, ArcModel):
        model.grow(slots)
    else:
        model.slots = slots


uses = st.lists(st.lists(st.sampled_from("abcdefghijkl"), min_size=1, max_size=8), max_size=30)


@pytest.mark.parametrize("policy", [LRUPolicy, ArcPolicy])
@given(slots=st.integers(1, 9), more=st.integers(0, 4), told=uses)
def test_it_has_what_the_policy_keeps(
    policy: type[LRUPolicy | ArcPolicy], slots: int, more: int, told: list[list[str]]
) -> None:
    """And so has the model of `adaptive` with `arc`."""
    model, tier = MODELS[policy](slots), Tier(slots, policy)
    for place, keys in enumerate(told):
        if place == len(told) // 2:
            grow(model, slots + more)
            tier.grow(slots + more)
        if place % 3 == 2:
            used = told[place - 1][::-1]
            model.ended(used)
            tier.policy.regroup([tier.slot_of[key] for key in used if key in tier.slot_of])
        assert model.use(keys) == tier.use(keys)
        assert set(model.keys) == set(tier.slot_of)


def test_it_has_no_more_than_its_slots() -> None:
    model, rng = RecencyModel(5), random.Random(0)
    for _ in range(100):
        model.use([f"{rng.randrange(20)}" for _ in range(rng.randrange(1, 12))])
        assert len([*model.keys]) <= 5


@pytest.mark.parametrize("slots", [1, MODEL_BLOCKS, MODEL_BLOCKS + 1, 100 * MODEL_BLOCKS])
def test_a_sample_leaves_no_more_than_a_model_has(slots: int) -> None:
    one_in = sample_of(slots)
    assert slots <= MODEL_BLOCKS * one_in
    assert one_in == 1 or slots > MODEL_BLOCKS * one_in // 2


@pytest.mark.parametrize("one_in", [1, 2, 64, 256, 512, 4096])
def test_of_hashes_as_vllm_has_them_one_in_so_many_is_sampled(one_in: int) -> None:
    rng = random.Random(one_in)
    keys: list[Hashable] = [rng.randbytes(32) + bytes(4) for _ in range(20 * max(one_in, 50))]
    some = sampled(keys, one_in)
    assert 0.5 < len(some) * one_in / len(keys) < 1.5
    assert sampled(dict.fromkeys(keys), one_in) == some == sampled(some, one_in)
    assert [key for key in keys if sample_marks([key], one_in)[0]] == some, "alone or among others"
    assert set(sampled(keys, 2 * one_in)) <= set(some)


def test_keys_that_are_no_bytes_of_one_length_are_sampled_as_well() -> None:
    for keys in (
        [],
        [b""],
        [b"", b"a"],
        [b"a", b"bc"],
        [("a", n) for n in range(100)],
        [*range(9)],
    ):
        some = sampled(keys, 4)
        assert some == [key for key in keys if hash(key) % 4 == 0]


def test_the_same_keys_are_looked_at_once() -> None:
    sample, keys = KeySample(), [f"{n}" for n in range(200)]
    first = sample.look(keys, 4)
    assert first == [key for key in keys if hash(key) % 4 == 0] and 20 < len(first) < 80
    assert sample.of(keys, 4) is first
    assert sample.of([*keys], 4) is not first, "other objects may hold other keys"
    sample.look(keys, 4)
    assert sample.of(keys, 8) == [key for key in keys if hash(key) % 8 == 0]
    keys.clear()
    assert sample.look(keys, 8) == []


def test_auto_and_adaptive_look_at_what_a_step_computes_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = OffloadManager(1024, AdaptivePolicy, store="auto", gpu_blocks=512)
    assert tier._gain is not None and isinstance(tier._prefixes.policy, AdaptivePolicy)
    assert tier._prefixes.policy.sample is tier._gain.sample
    tier.clear()
    assert isinstance(tier._prefixes.policy, AdaptivePolicy)
    assert tier._prefixes.policy.sample is tier._gain.sample
    told: list[int] = []
    look = tier._gain.sample.look

    def note(keys: Collection[Hashable], one_in: int) -> Sequence[Hashable]:
        told.append(len(keys))
        return look(keys, one_in)

    monkeypatch.setattr(tier._gain.sample, "look", note)
    plan = tier.make_plan(lambda block, key: True, {f"{n}": n for n in range(64)})
    assert plan is not None and len(plan.after[0].source_ids) == 64
    assert told == [64], "once, and not for the policy again"
    assert len(tier._prefixes.policy._known) == 64, "of a small tier every key is sampled"
