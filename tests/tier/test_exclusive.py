"""Copies of what the GPU holds leave first; what it is about to lose is stored, and stays."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

import pytest
from tier.plans import store_of
from tier.steps import steps_of
from tier.strict import Strict
from tier.tier_machine import Gain

from kvoffload_patch.tier import state
from kvoffload_patch.tier.exclusive import blocks_ahead
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies.arc import ArcPolicy
from kvoffload_patch.tier.policies.lru import LRUPolicy


def plan(tier: OffloadManager, **computed: int) -> str:
    """A step computes these, and all is done; returns the keys that it has stored, in order."""
    of_block = {block: key for key, block in computed.items()}
    before = dict(tier._slot_of)
    made = tier.make_plan(lambda block, key: True, computed)
    tier.apply(tier.drained())
    store = store_of(made) if made is not None else None
    assert store is None or all(b in of_block or b < 100 for b in store.source_ids)
    return "".join(key for key in tier._slot_of if key not in before)


def held(tier: OffloadManager) -> str:
    return "".join(sorted(tier._slot_of))


def lose(tier: OffloadManager, blocks: Sequence[tuple[int, str]]) -> str:
    """The GPU is about to lose these; returns what is stored of them."""
    tier.about_to_lose([block for block, _ in blocks], [key for _, key in blocks])
    stored = plan(tier)
    tier.note_new_blocks([block for block, _ in blocks])
    return stored


def test_auto_stores_what_is_computed_while_slots_are_free_and_the_rest_before_it_is_lost() -> None:
    tier = OffloadManager(2, LRUPolicy, store="auto")
    assert tier.lazy
    assert plan(tier, a=0, b=1, c=2) == "ab"
    assert plan(tier, d=3) == ""
    assert lose(tier, [(2, "c")]) == "c", "evicts a copy"
    assert len(held(tier)) == 2 and "c" in held(tier)


def test_lazy_stores_nothing_before_it_is_about_to_be_lost() -> None:
    tier = OffloadManager(4, LRUPolicy, store="lazy")
    assert plan(tier, a=0, b=1) == ""
    assert tier.about_to_lose([1, 0], ["b", "a"]) == 2
    assert plan(tier) == "ab", "what is lost last is the head of the transfer"
    assert tier.about_to_lose([1, 0], ["b", "a"]) == 0


def test_what_is_handed_out_before_it_is_stored_is_not_stored() -> None:
    tier = OffloadManager(4, LRUPolicy, store="lazy")
    plan(tier, a=0)
    tier.about_to_lose([0], ["a"])
    tier.note_new_blocks([0])
    assert plan(tier) == ""
    assert tier.stats.overwritten == 1


def test_what_was_loaded_leaves_before_what_only_the_tier_has() -> None:
    tier = OffloadManager(2, LRUPolicy, store="auto")
    plan(tier, a=0, b=1)
    lose(tier, [(0, "a"), (1, "b")])  # a least recently
    tier.begin_load("b", [5])
    plan(tier)
    plan(tier, c=6)
    assert lose(tier, [(6, "c")]) == "c"
    assert held(tier) == "ac"


class Pins(LRUPolicy):
    """Remembers the keys of what it is told to pin."""

    pinned = ""

    def pin(self, slots: Sequence[int]) -> None:
        self.pinned += "".join(str(self._key_of[slot]) for slot in slots)
        super().pin(slots)


def test_a_load_of_what_the_gpu_has_lost_is_a_use_for_the_policy_behind() -> None:
    tier = OffloadManager(3, Pins, store="auto")
    plan(tier, a=0, b=1, c=2)
    lose(tier, [(0, "a"), (1, "b")])
    tier.begin_load("ba", [5, 6])
    plan(tier)
    assert tier._exclusive is not None
    assert tier._prefixes.policy.pinned == "ab"
    tier.begin_load("ca", [7, 8])
    assert tier._prefixes.policy.pinned == "ab", "the GPU has them"


def test_what_is_handed_out_before_it_came_to_be_stored_is_counted() -> None:
    tier = OffloadManager(1, LRUPolicy, store="auto")
    assert plan(tier, a=0, b=1, c=2) == "a"
    tier.about_to_lose([1], ["b"])
    tier.note_new_blocks([0, 1])
    assert tier.stats.overwritten == 1, "the tier has a"
    tier.note_new_blocks([2, 3])
    assert tier.stats.overwritten == 2
    tier.note_new_blocks([2])
    assert tier.stats.overwritten == 2, "it held nothing more"


def test_what_is_handed_out_while_it_waits_to_be_stored_counts_once() -> None:
    tier = OffloadManager(1, LRUPolicy, store="auto")
    for key, block in tier.offer({"a": 0, "b": 1}).items():
        tier.queue_store(key, block)
    assert len(tier._queue) == 1, "b has no slot yet"
    tier.note_new_blocks([0, 1])
    assert tier.stats.overwritten == 2


def test_a_copy_stays_once_the_gpu_has_lost_the_block_or_is_about_to() -> None:
    for handed_out in (True, False):
        tier = OffloadManager(3, LRUPolicy, store="auto")
        plan(tier, a=0, b=1, c=2)
        lose(tier, [(0, "a"), (1, "b"), (2, "c")])
        tier.begin_load("b", [5])
        tier.begin_load("c", [6])
        plan(tier)
        if handed_out:
            tier.note_new_blocks([5])
        else:
            tier.about_to_lose([5], ["b"])
        plan(tier, d=7)
        lose(tier, [(7, "d")])
        assert held(tier) == "abd"


@pytest.mark.parametrize(
    ("cached", "handed_out", "left"),
    [("b", [], "ac"), ("a", [], "bc"), ("ab", [], "ac"), ("ab", [1], "bc")],
)
def test_what_is_hit_on_the_gpu_becomes_a_copy_if_the_gpu_still_has_it(
    cached: str, handed_out: list[int], left: str
) -> None:
    tier = OffloadManager(2, LRUPolicy, store="auto")
    plan(tier, a=0, b=1)
    tier.about_to_lose([0, 1], ["a", "b"])  # both stay; a would leave first
    tier.hit_on_gpu([0, 1], ["a", "b"], lambda block, key: key in cached)
    tier.note_new_blocks(handed_out)
    plan(tier, c=7)
    lose(tier, [(7, "c")])
    assert held(tier) == left


def test_of_what_one_plan_stores_the_gpu_has_lost_some_when_it_is_done() -> None:
    tier = OffloadManager(2, Strict, store="auto")
    tier.make_plan(lambda block, key: True, {"a": 0, "b": 1})
    tier.note_new_blocks([0])
    tier.apply(tier.drained())
    for key, block, left in (("c", 7, "ac"), ("d", 8, "cd")):
        plan(tier, **{key: block})
        assert lose(tier, [(block, key)]) == key and held(tier) == left


def test_slots_that_become_usable_hold_copies_and_what_the_gpu_has_lost() -> None:
    tier = OffloadManager(1, Strict, growing=True, store="auto")
    assert plan(tier, a=0) == "a"
    tier.apply(tier.drained()._replace(num_slots=3, growing=False))
    assert plan(tier, b=1, c=2) == "bc"
    lose(tier, [(2, "c"), (0, "a")])
    plan(tier, d=3)
    assert lose(tier, [(3, "d")]) == "d" and held(tier) == "acd", "b was a copy"


def test_the_policy_behind_is_told_what_is_missing() -> None:
    tier = OffloadManager(9, ArcPolicy, store="lazy")
    for block, key in enumerate("abcdefghij"):
        plan(tier, **{key: block})
        lose(tier, [(block, key)])
    policy = tier._prefixes.policy
    assert "a" not in held(tier) and policy.share == 9 / 8
    plan(tier, a=20)
    assert policy.share > 9 / 8, "more for what was used once"


def test_a_loading_slot_is_not_evicted_however_often_it_is_hit() -> None:
    tier = OffloadManager(1, LRUPolicy, store="auto")
    plan(tier, a=0)
    tier.touch("aa")
    tier.begin_load("a", [5])
    tier.touch("a")
    tier.about_to_lose([7], ["c"])
    tier.make_plan(lambda block, key: True)
    assert (held(tier), tier.stats.dropped) == ("a", 1)


@pytest.mark.parametrize("at_once", [1, 100])
@pytest.mark.parametrize("store", ["auto", "lazy", "now and then"])
@pytest.mark.parametrize("seed", range(8))
def test_each_slot_that_can_leave_is_a_copy_or_the_policys_behind(
    seed: int, store: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In neither order it would never leave, in both another block would leave with it."""
    monkeypatch.setattr(state, "GIVEN_BACK_BLOCKS", at_once)
    rng, gpu, copies = random.Random(seed), dict[int, str](), 0
    tier, gain = OffloadManager(8, Strict, store=store if store == "lazy" else "auto"), Gain()
    if store == "now and then":
        tier._gain = gain
    for _ in range(200):
        gain.pays ^= not rng.randrange(8)
        happens, blocks = rng.randrange(6), rng.sample(range(12), rng.randrange(1, 4))
        keys = rng.sample("abcdefghijklmnop", len(blocks))
        held = [block for block in blocks if block in gpu]
        if happens < 3:
            if rng.randrange(8):
                tier.about_to_lose(held, [gpu[block] for block in held])
                tier.make_plan(lambda block, key: True)
            tier.note_new_blocks(blocks)
            loads = happens == 2 and all(map(tier.lookup, keys))
            gpu = {block: key for block, key in gpu.items() if block not in blocks}
            if loads:
                tier.begin_load(keys, blocks)
            gpu.update(zip(blocks, keys))
            computed = {} if loads else dict(zip(keys, blocks))
            tier.make_plan(lambda block, key: True, computed)
        elif happens == 3:
            tier.about_to_lose(held, [gpu[block] for block in held])
        elif happens == 4:
            tier.hit_on_gpu(held, [gpu[block] for block in held], lambda *_: True)
        else:
            tier.discard(keys[0])
        if rng.randrange(2):
            tier.apply(tier.drained())
        copies += minded(tier, gpu.values())
    assert copies


def minded(tier: OffloadManager, on_gpu: Collection[str]) -> int:
    """How many copies there are; each slot is in the orders that it should be in."""
    order, behind = tier._exclusive, tier._prefixes.policy
    assert isinstance(behind, Strict)
    idle = {slot for slot in tier._slot_of.values() if tier._is_idle(slot)}
    copies = {slot for slot, batch in enumerate(tier._copies.batch_of) if batch}
    assert behind.known == idle - copies and len(copies) == tier._copies.sizes[0]
    if order is None:
        assert not copies
        return 0
    assert copies <= idle == {slot for slot in tier._slot_of.values() if slot not in order._apart}
    assert {tier._key_of[slot] for slot in copies} <= {*on_gpu}, "only the tier has it"
    return len(copies)


class Told(LRUPolicy):
    """Notes what it is told of, by key."""

    def __init__(self, key_of: Sequence[str]) -> None:
        super().__init__(key_of)
        self.uses: list[tuple[str, str]] = []

    def insert(self, slots: Sequence[int]) -> None:
        self.uses.append(("insert", "".join(self._key_of[slot] for slot in slots)))
        super().insert(slots)

    def hit(self, slots: Sequence[int]) -> None:
        self.uses.append(("hit", "".join(self._key_of[slot] for slot in slots)))
        super().hit(slots)


def told(tier: OffloadManager) -> list[tuple[str, str]]:
    uses: list[tuple[str, str]] = tier._prefixes.policy.uses
    taken = list(uses)
    uses.clear()
    return taken


def test_the_other_policy_learns_what_was_used_again_on_the_gpu() -> None:
    tier = OffloadManager(4, policy=Told, store="lazy")
    plan(tier, a=0, b=1, c=2)
    tier.hit_on_gpu([0], ["a"], lambda block, key: True)
    lose(tier, [(2, "c"), (1, "b"), (0, "a")])
    assert told(tier) == [("insert", "cba"), ("hit", "a")]
    tier.begin_load("c", [5])
    plan(tier)
    assert told(tier) == []
    tier.note_new_blocks([5])
    assert told(tier) == [("insert", "c"), ("hit", "c")]


def test_a_third_that_is_used_again_makes_the_whole_request_so() -> None:
    for used, hits in ((0, []), (1, [("hit", "cba")])):
        tier = OffloadManager(4, policy=Told, store="lazy")
        plan(tier, a=0, b=1, c=2)
        tier.hit_on_gpu([0][:used], ["a"][:used], lambda block, key: True)
        tier.request_ended("abc")
        lose(tier, [(2, "c"), (1, "b"), (0, "a")])
        assert told(tier)[1:] == hits


def test_what_is_remembered_of_uses_has_a_bound() -> None:
    tier = OffloadManager(2, LRUPolicy, store="lazy")
    for block in range(1000):
        tier.hit_on_gpu([block % 8], [f"key-{block}"], lambda *_: True)
        tier.note_new_blocks([block % 8])
    assert len(tier._exclusive._again) < 20
    assert not tier._exclusive._on_gpu and not tier._exclusive._key_in


def test_an_eighth_of_the_gpu_is_looked_at_and_two_steps_at_least() -> None:
    assert blocks_ahead(8000, 100) == 1000
    assert blocks_ahead(800, 100) == 200


class Weighed:
    """Stands for `ExclusiveGain`: the test says whether it pays."""

    pays = False

    def told(self, _: object) -> None:
        pass

    resize = computed = loaded = hit_on_gpu = told


def weighed(slots: int) -> tuple[OffloadManager, Weighed]:
    tier, gain = OffloadManager(slots, Strict, store="auto", gpu_blocks=8), Weighed()
    tier._gain = gain  # type: ignore[assignment]
    return tier, gain


def test_auto_is_eager_until_it_pays_to_give_copies_up_and_again_once_it_does_not() -> None:
    tier, gain = weighed(2)
    assert plan(tier, a=0, b=1) == "ab" and not tier.lazy
    assert plan(tier, d=3) == "d" and held(tier) == "ad", "for which the tail of the others leaves"
    gain.pays = True
    assert plan(tier, e=4) == "" and tier.lazy and held(tier) == "ad"
    tier.begin_load("d", [5])
    plan(tier)
    assert lose(tier, [(4, "e")]) == "e" and held(tier) == "ae", "d was a copy"
    gain.pays = False
    assert plan(tier, f=6) == "f" and not tier.lazy
    assert not tier.looks_ahead and tier.about_to_lose([0], ["a"]) == 0


def test_the_step_in_which_auto_changes_waits_with_what_it_computes_as_those_behind_it_do() -> None:
    tier, gain = weighed(4)

    def stores(key: str, block: int) -> bool:
        return tier.make_plan(lambda block, key: True, {key: block}, can_wait=True) is not None

    gain.pays = True
    assert stores("a", 0) and tier.lazy and not tier._waiting, "into slots that are free"
    gain.pays = False
    assert not stores("b", 1) and not tier.lazy and len(tier._waiting) == 1


def test_what_is_loading_while_auto_changes_is_neither_evicted_nor_lost() -> None:
    for first in (False, True):
        tier, gain = weighed(2)
        plan(tier, a=0, b=1)
        gain.pays = first
        plan(tier)
        tier.begin_load("a", [5])
        tier.make_plan(lambda block, key: True)
        gain.pays = not first
        tier.make_plan(lambda block, key: True)
        assert tier.lazy is not first
        tier.about_to_lose([7], ["x"])
        for key, block in (("c", 2), ("d", 3)):
            tier.make_plan(lambda block, key: True, {key: block})
        assert "a" in held(tier)
        tier.apply(tier.drained())
        gain.pays = False
        plan(tier, e=4, f=6)
        assert held(tier) == "ef", "once its load is over it can leave as any other"


def test_prefixes_are_kept_in_order_whatever_was_a_copy_before() -> None:
    tier, gain = weighed(6)
    plan(tier, a=0, b=1, c=2)
    tier.request_ended("abc", together=False)
    gain.pays = True
    plan(tier)
    tier.begin_load("abc", [5, 6, 7])
    plan(tier)
    gain.pays = False
    plan(tier)
    tier.request_ended("abc", together=False)
    plan(tier, x=10, y=11, z=12)
    assert plan(tier, p=13) == "p" and held(tier) == "abpxyz", "the tail leaves first"


def test_a_reset_or_another_policy_leaves_auto_as_it_was() -> None:
    for happens in ("clear", "change_policy"):
        tier, gain = weighed(4)
        gain.pays = True
        plan(tier, a=0, b=1)
        if happens == "clear":
            tier.clear()
        else:
            tier.change_policy(Strict)
        assert tier.lazy
        gain.pays = False
        assert plan(tier, c=2, d=3, e=4, f=5) == "cdef" and not tier.lazy


def change_policy(tier: OffloadManager) -> None:
    tier.change_policy(LRUPolicy)


def use_less(tier: OffloadManager) -> None:
    tier.resize(2)


@pytest.mark.parametrize("happens", [change_policy, use_less])
def test_what_the_gpu_holds_is_known_after_another_policy_or_size(
    happens: Callable[[OffloadManager], None],
) -> None:
    tier = OffloadManager(2 + (happens is use_less), LRUPolicy, store="auto")
    plan(tier, a=0, b=1)
    lose(tier, [(0, "a"), (1, "b")])
    tier.begin_load("b", [5])
    plan(tier)
    happens(tier)
    plan(tier, c=6)
    assert lose(tier, [(6, "c")]) == "c"
    assert held(tier) == "ac", "b is a copy as before"


@pytest.mark.parametrize("happens", [change_policy, use_less])
def test_what_the_gpu_loses_at_once_is_stored_at_once_after_another_policy_or_size(
    happens: Callable[[OffloadManager], None],
) -> None:
    tier = OffloadManager(4, LRUPolicy, store="lazy")
    plan(tier, a=0)
    tier.note_new_blocks([0])
    assert tier.stats.overwritten == 1
    happens(tier)
    assert plan(tier, b=1) == "b"


def test_auto_weighs_what_is_computed_loaded_and_hit() -> None:
    tier = OffloadManager(8, LRUPolicy, store="auto", gpu_blocks=16)
    for turn in range(40):  # two blocks at a time, of twenty
        keys = [f"{(2 * turn + n) % 20}" for n in range(2)]
        found = [key for key in keys if tier.lookup(key)]
        if found:
            tier.begin_load(found, list(range(len(found))))
        plan(tier, **{key: 8 + n for n, key in enumerate(keys) if key not in found})
    assert tier.lazy, "twenty fit in eight and sixteen"


def steps_of_becoming_lazy(slots: int) -> int:
    """Of a full tier of so many slots, while a block is loaded and another one is written."""
    tier = OffloadManager(slots, LRUPolicy, store="auto", gpu_blocks=10)
    assert tier._gain is not None
    keys = [f"key-{number}" for number in range(slots)]
    plan(tier, **dict(zip(keys, range(100, 100 + slots))))
    tier.begin_load(keys[:1], [1])
    tier.make_plan(lambda block, key: True, {"a": 2})
    tier._gain.pays = True
    steps = steps_of(lambda: tier.make_plan(lambda block, key: True))
    assert tier.lazy and tier.num_used == slots
    return steps


def test_becoming_lazy_takes_no_more_steps_in_a_larger_tier() -> None:
    assert steps_of_becoming_lazy(1000) == steps_of_becoming_lazy(10)


def lazy_tier(slots: int) -> OffloadManager:
    """It holds copies of as many blocks of the GPU."""
    tier = OffloadManager(slots, Strict, store="auto", gpu_blocks=slots)
    assert tier._gain is not None
    tier._gain.pays = True
    tier.make_plan(lambda block, key: True)
    plan(tier, **{f"key-{number}": number for number in range(slots)})
    tier.begin_load(["key-0"], [0])  # it is under way until the end
    assert tier.lazy and tier._copies.sizes[0] == slots - 1
    tier._gain.pays = False
    return tier


def steps_of_becoming_eager(slots: int) -> list[int]:
    """Of each step from then on in which the tier is lazy still."""
    tier, steps = lazy_tier(slots), []
    while tier.lazy:
        steps.append(steps_of(lambda: tier.make_plan(lambda block, key: True)))
    behind = tier._prefixes.policy
    assert isinstance(behind, Strict) and behind.pinned == {tier._slot_of["key-0"]}
    assert behind.known | behind.pinned == {*range(slots)} and not tier._copies.sizes[0]
    return steps


def test_a_step_that_becomes_eager_again_does_not_work_for_all_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "GIVEN_BACK_BLOCKS", 10)
    few, many = steps_of_becoming_eager(30), steps_of_becoming_eager(1000)
    assert (len(few), len(many)) == (3, 100)
    assert max(many) < 1.2 * max(few)


def test_a_tier_that_becomes_eager_again_stores_at_once_and_makes_no_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "GIVEN_BACK_BLOCKS", 1)
    tier = lazy_tier(4)
    assert plan(tier, new=9) == "new" and tier.lazy
    tier.hit_on_gpu([1, 9], ["key-1", "new"], lambda *_: True)
    behind = tier._prefixes.policy
    assert isinstance(behind, Strict)
    assert {tier._key_of[slot] for slot in behind.known} >= {"key-1", "new"}
    assert tier._gain is not None
    tier._gain.pays = True
    tier.make_plan(lambda block, key: True)
    assert tier._exclusive is not None and not tier._exclusive.stores_at_once, "it goes on"
