"""`OffloadManager` one property at a time, and its cost at a thousand and at a million slots."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import FrameType
from typing import Any

import pytest
from tier.plans import a_load, a_plan, a_result, a_store, store_of

from kvoffload_patch.links import LOAD, STORE
from kvoffload_patch.plan import TransferPlan
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies import POLICIES
from kvoffload_patch.tier.policies.lru import LRUPolicy
from kvoffload_patch.tier.stats import TierStats
from kvoffload_patch.tier.tuning import TOGETHER_BLOCKS, TOGETHER_STEPS


def always(block: int, key: object) -> bool:
    return True


def plan_store(tier: OffloadManager, keys: Iterable[Any], first_block: int = 0) -> TransferPlan:
    """Queue keys, head first, from neighbouring GPU blocks, and make the plan."""
    for block, key in enumerate(keys, first_block):
        tier.queue_store(key, block)
    plan = tier.make_plan(always)
    assert plan is not None
    return plan


def store(tier: OffloadManager, keys: Iterable[Any]) -> TransferPlan:
    """Store keys and take in that it is done."""
    plan = plan_store(tier, keys)
    tier.apply(tier.drained())
    return plan


def readable(tier: OffloadManager, keys: Iterable[Any]) -> str:
    return "".join(key for key in keys if tier.lookup(key))


def evict_in_order(tier: OffloadManager, keys: str) -> str:
    """The order in which keys are evicted, one at a time."""
    order = ""
    for i in range(len(keys)):
        before = readable(tier, keys)
        store(tier, [("new", i)])
        order += "".join(key for key in before if not tier.lookup(key))
    return order


def test_nothing_to_do_is_no_plan() -> None:
    tier = OffloadManager(4, LRUPolicy)
    assert tier.make_plan(always) is None
    tier.note_new_blocks([1, 2])
    tier.expose_load(0)
    assert tier.make_plan(always) is None
    assert not tier.busy


def test_what_is_computed_once_more_is_counted_and_not_stored() -> None:
    tier = OffloadManager(8, LRUPolicy)
    store(tier, "ab")
    assert tier.stats.held == 0
    made = store_of(tier.make_plan(always, {"a": 5, "b": 6, "c": 7}))
    assert made is not None and made.source_ids == (7,)
    assert tier.stats.held == 2


def test_a_block_is_readable_only_once_its_store_is_done() -> None:
    tier = OffloadManager(4, LRUPolicy)
    tier.queue_store("a", 7)
    assert not tier.holds("a")
    plan = tier.make_plan(always)
    assert plan == a_plan(store=a_store(1, (7,), (0,)))
    assert tier.holds("a")
    assert not tier.lookup("a") and tier.reader()("a") is None
    assert tier.apply(a_result(0, 0)) == []
    assert not tier.lookup("a") and tier.reader()("a") is None
    assert tier.apply(a_result(0, 1)) == ["a"]
    assert tier.lookup("a") and tier.reader()("a") is not None


def test_many_keys_are_readable_up_to_the_first_that_is_not() -> None:
    tier = OffloadManager(8, LRUPolicy)
    store(tier, "abc")
    assert [tier.num_readable(keys) for keys in ("", "abc", "abxc", "xab")] == [0, 3, 2, 0]
    plan_store(tier, "de", first_block=5)
    assert tier.num_readable("abdc") == 2, "a store of it is under way"
    tier.apply(tier.drained())
    assert tier.num_readable("abdce") == 5


def test_a_store_of_a_block_that_was_handed_out_again_is_dropped() -> None:
    tier = OffloadManager(4, LRUPolicy)
    tier.queue_store("a", 1)
    tier.queue_store("b", 2)
    tier.note_new_blocks([1])
    plan = tier.make_plan(always)
    assert plan is not None
    assert store_of(plan) is not None
    assert store_of(plan).source_ids == (2,)
    assert tier.stats.dropped == 0


def test_the_next_forward_pass_waits_for_the_store_that_reads_a_block_handed_out() -> None:
    tier = OffloadManager(4, LRUPolicy)
    plan_store(tier, "a", first_block=1)
    plan_store(tier, "b", first_block=2)
    tier.note_new_blocks([2, 1])
    waiting = tier.make_plan(always)
    assert waiting == a_plan(wait_store=2)
    assert tier.make_plan(always) is None, "it has been waited for"


def test_a_store_that_a_forward_pass_has_waited_for_is_not_waited_for_again() -> None:
    tier = OffloadManager(4, LRUPolicy)
    plan_store(tier, "a", first_block=1)
    plan_store(tier, "b", first_block=2)
    tier.note_new_blocks([2])
    assert tier.make_plan(always) == a_plan(wait_store=2)
    tier.note_new_blocks([1, 2])
    assert tier.make_plan(always) is None, "nor one before it"
    plan_store(tier, "c", first_block=2)
    tier.note_new_blocks([1, 2])
    assert tier.make_plan(always) == a_plan(wait_store=3)


def test_a_later_store_than_a_forward_pass_has_waited_for_is_waited_for() -> None:
    tier = OffloadManager(4, LRUPolicy)
    plan_store(tier, "a", first_block=1)
    plan_store(tier, "b", first_block=2)
    for block in (1, 2):
        tier.note_new_blocks([block])
        assert tier.make_plan(always) == a_plan(wait_store=block)


def test_a_store_that_one_rank_has_done_is_still_waited_for_by_the_others() -> None:
    tier = OffloadManager(4, LRUPolicy)
    store(tier, "a")
    tier.note_new_blocks([0])
    assert tier.make_plan(always) == a_plan(wait_store=1, stores_done=1)
    tier.note_new_blocks([0])
    assert tier.make_plan(always) is None, "the forward pass after the next one needs no wait"


def test_a_block_stored_twice_is_waited_for_by_its_last_store() -> None:
    tier = OffloadManager(4, LRUPolicy)
    plan_store(tier, "a", first_block=5)
    plan_store(tier, "b", first_block=5)
    tier.apply(a_result(0, 1))
    tier.note_new_blocks([5])
    plan = tier.make_plan(always)
    assert plan is not None
    assert (plan.waits_for(STORE), plan.known_done(STORE)) == (2, 1)


def test_what_is_not_storable_is_forgotten() -> None:
    tier = OffloadManager(4, LRUPolicy)
    tier.queue_store("a", 1)
    assert tier.make_plan(lambda block, key: (block, key) != (1, "a")) is None
    assert tier.make_plan(always) is None
    assert not tier.holds("a")
    assert tier.stats.dropped == 0


def test_a_key_in_two_gpu_blocks_is_stored_once_from_one_that_has_it() -> None:
    tier = OffloadManager(4, LRUPolicy)
    for block in (1, 2, 3):
        tier.queue_store("a", block)
    plan = tier.make_plan(lambda block, key: block != 1)
    assert plan is not None
    assert store_of(plan) is not None
    assert store_of(plan).source_ids == (2,)
    assert tier.num_used == 1


def test_a_key_that_has_a_slot_is_not_stored_again() -> None:
    tier = OffloadManager(4, LRUPolicy)
    plan_store(tier, "a")
    tier.queue_store("a", 9)
    assert tier.make_plan(always) is None
    tier.apply(tier.drained())
    tier.queue_store("a", 9)
    assert tier.make_plan(always) is None


def test_load_tickets_increase_by_one_and_each_is_planned_once() -> None:
    tier = OffloadManager(4, LRUPolicy)
    slots = store_of(store(tier, "ab"))
    assert slots is not None
    assert [tier.begin_load("ab", [5, 6]), tier.begin_load("b", [7])] == [1, 2]
    tier.expose_load(2)
    plan = tier.make_plan(always)
    assert plan is not None
    assert plan.before == (
        a_load(1, (5, 6), slots.target_ids),
        a_load(2, (7,), slots.target_ids[1:]),
    )
    assert (plan.waits_for(LOAD), plan.known_done(STORE), plan.known_done(LOAD)) == (2, 1, 0)
    assert tier.make_plan(always) is None
    assert tier.begin_load("a", [8]) == 3


def test_a_load_that_the_step_reads_is_waited_for_and_promised_and_another_is_waited_for() -> None:
    tier = OffloadManager(4, LRUPolicy)
    store(tier, "ab")
    read, other = tier.begin_load("a", [7]), tier.begin_load("b", [8])
    tier.expose_load(read)
    plan = tier.make_plan(always)
    assert plan is not None
    assert (plan.waits_for(LOAD), plan.promised) == (read, ((LOAD, read),))
    tier.await_load(other)
    assert tier.make_plan(always) == a_plan(wait_load=other, stores_done=1)


@pytest.mark.parametrize("missing", ["never stored", "under way"])
def test_a_load_of_what_is_not_readable_changes_nothing(missing: str) -> None:
    tier = OffloadManager(2, LRUPolicy)
    store(tier, "a")
    plan_store(tier, ["under way"])
    with pytest.raises(KeyError, match=missing):
        tier.begin_load(["a", missing], [1, 2])
    tier.apply(tier.drained())
    assert tier.make_plan(always) is None, "a load was planned"
    assert not tier.busy
    store(tier, "xy")
    assert not tier.lookup("a"), "a stayed pinned"
    assert tier.begin_load("x", [1]) == 1


def test_a_block_that_is_loaded_is_never_evicted_and_its_store_gives_way() -> None:
    tier = OffloadManager(2, LRUPolicy)
    store(tier, "ab")
    ticket = tier.begin_load("ba", [5, 6])
    plan = plan_store(tier, "cd")
    assert store_of(plan) is None
    assert readable(tier, "abcd") == "ab"
    assert (tier.stats.dropped, tier.stats.evicted) == (2, 0)
    tier.apply(a_result(ticket, 1))
    plan = plan_store(tier, "cd")
    assert store_of(plan) is not None
    assert plan.known_done(LOAD) == ticket
    assert readable(tier, "abcd") == ""
    assert (tier.stats.dropped, tier.stats.evicted) == (2, 2)


def test_a_block_loaded_twice_stays_pinned_until_both_loads_are_done() -> None:
    tier = OffloadManager(1, LRUPolicy)
    store(tier, "a")
    tier.begin_load("a", [5])
    tier.begin_load("a", [6])
    tier.apply(a_result(1, 1))
    assert store_of(plan_store(tier, "b")) is None
    tier.apply(a_result(2, 1))
    assert store_of(plan_store(tier, "b")) is not None


def test_a_tier_that_is_being_written_drops_what_does_not_fit_from_the_tail() -> None:
    tier = OffloadManager(3, LRUPolicy)
    plan = plan_store(tier, "abcde")
    assert store_of(plan) is not None
    assert store_of(plan).source_ids == (0, 1, 2)
    assert tier.stats.dropped == 2
    for block, key in enumerate("fg"):
        tier.queue_store(key, block)
    assert tier.make_plan(always) is None
    assert tier.stats.dropped == 4
    tier.apply(tier.drained())
    assert readable(tier, "abcdefg") == "abc"
    assert tier.stats == TierStats(stored=3, dropped=4)


def test_blocks_that_the_gpu_lost_before_their_store_are_counted() -> None:
    tier = OffloadManager(4, LRUPolicy)
    for block, key in enumerate("abcd"):
        tier.queue_store(key, block)
    tier.note_new_blocks([0, 9])
    plan = tier.make_plan(lambda block, key: key != "b")
    assert plan is not None and store_of(plan).source_ids == (2, 3)
    assert (tier.stats.overwritten, tier.stats.dropped) == (2, 0)


def test_what_waits_for_slots_of_a_growing_tier_is_looked_at_once_and_goes_in_order() -> None:
    tier, looked_at = OffloadManager(2, LRUPolicy, growing=True), []

    def storable(block: int, key: object) -> bool:
        looked_at.append(block)
        return key != "c"

    for block, key in enumerate("abcdefg"):
        tier.queue_store(key, block)
    stored = []
    for num_slots in (2, 2, 4, 5, 9):
        plan = tier.make_plan(storable)
        stored.append(store_of(plan).source_ids if plan and store_of(plan) else ())
        tier.apply(tier.drained()._replace(num_slots=num_slots, growing=True))
    assert stored == [(0, 1), (), (), (3, 4), (5,)]
    assert store_of(tier.make_plan(storable)).source_ids == (6,)  # type: ignore[union-attr]
    assert looked_at == [0, 1, 2, 3, 4, 5, 6]


def test_a_result_that_says_nothing_of_slots_leaves_growth_as_it_was() -> None:
    tier = OffloadManager(1, LRUPolicy, growing=True)
    tier.queue_store("a", 0)
    tier.make_plan(lambda block, key: True)
    tier.apply(a_result(0, 1))
    tier.queue_store("b", 1)
    assert tier.make_plan(lambda block, key: True) is None, "nothing is evicted while it grows"
    tier.apply(a_result(0, 0, num_slots=1))
    assert tier.make_plan(lambda block, key: True) is not None


def test_a_tier_of_one_slot_holds_the_block_stored_last() -> None:
    tier = OffloadManager(1, LRUPolicy)
    for key in "abc":
        plan = store(tier, key)
        assert store_of(plan) is not None
        assert store_of(plan).target_ids == (0,)
        assert readable(tier, "abc") == key
    assert tier.num_used == 1
    assert tier.stats.evicted == 2


def test_a_tier_without_slots_drops_everything() -> None:
    tier = OffloadManager(0, LRUPolicy)
    tier.queue_store("a", 1)
    assert tier.make_plan(always) is None
    assert tier.stats.dropped == 1


def test_a_stored_prefix_is_evicted_from_its_tail() -> None:
    tier = OffloadManager(4, LRUPolicy)
    store(tier, "abcd")
    assert evict_in_order(tier, "abcd") == "dcba"


def test_touching_a_prefix_makes_its_head_the_most_recent() -> None:
    tier = OffloadManager(4, LRUPolicy)
    for key in "abcd":
        store(tier, key)
    tier.touch(["c", "unknown", "a"])
    assert evict_in_order(tier, "abcd") == "bdac"


def test_a_loaded_prefix_is_recent_from_its_head() -> None:
    tier = OffloadManager(4, LRUPolicy)
    for key in "abcd":
        store(tier, key)
    tier.begin_load("ba", [5, 6])
    tier.touch("c")
    tier.touch("a")
    tier.apply(tier.drained())
    assert evict_in_order(tier, "abcd") == "dcab"


def test_several_tickets_done_at_once_are_taken_in_together() -> None:
    tier = OffloadManager(8, LRUPolicy)
    for i, key in enumerate("abc"):
        plan_store(tier, key, first_block=i)
    assert sorted(tier.apply(a_result(0, 3))) == ["a", "b", "c"]
    for i, key in enumerate("abc"):
        tier.begin_load(key, [i])
    assert [tier.load_done(t) for t in (1, 2, 3)] == [False] * 3
    assert tier.apply(a_result(3, 3)) == []
    assert [tier.load_done(t) for t in (1, 2, 3, 4)] == [True, True, True, False]
    assert not tier.busy
    assert (tier.stats.stored, tier.stats.loaded) == (3, 3)


def test_a_stale_result_is_harmless() -> None:
    tier = OffloadManager(4, LRUPolicy)
    store(tier, "ab")
    tier.begin_load("a", [5])
    tier.apply(a_result(1, 1))
    assert tier.apply(a_result(0, 0)) == []
    assert tier.apply(a_result(1, 1)) == []
    assert readable(tier, "ab") == "ab"
    assert tier.load_done(1)
    tier.begin_load("b", [6])
    plan = tier.make_plan(always)
    assert plan is not None
    assert (plan.known_done(LOAD), plan.known_done(STORE)) == (1, 1)
    assert tier.stats == TierStats(stored=2, loaded=1)


def test_clear_forgets_every_key_and_every_store_that_is_not_planned() -> None:
    tier = OffloadManager(4, LRUPolicy)
    store(tier, "ab")
    tier.queue_store("c", 5)
    tier.clear()
    assert not any(tier.holds(key) for key in "abc")
    assert tier.num_used == 0
    assert tier.make_plan(always) is None
    store(tier, "wxyz")
    assert tier.stats.evicted == 0


def test_a_store_under_way_at_clear_gives_its_slot_back_but_no_key() -> None:
    tier = OffloadManager(2, LRUPolicy)
    plan = plan_store(tier, "ab")
    tier.clear()
    assert tier.num_used == 2
    tier.queue_store("c", 5)
    assert tier.make_plan(always) is None, "a slot that is being written was given away"
    assert tier.apply(a_result(0, 1)) == []
    assert readable(tier, "abc") == ""
    assert tier.num_used == 0
    again = store_of(plan_store(tier, "ab"))
    assert again is not None
    assert store_of(plan) is not None
    assert sorted(again.target_ids) == sorted(store_of(plan).target_ids)


def test_a_load_under_way_at_clear_keeps_its_slot_until_it_is_done() -> None:
    tier = OffloadManager(2, LRUPolicy)
    store(tier, "ab")
    tier.begin_load("a", [5])
    tier.begin_load("a", [6])
    tier.clear()
    assert tier.num_used == 1
    tier.apply(a_result(1, 1))
    assert tier.num_used == 1
    tier.clear()
    assert tier.num_used == 1, "a second clear gave the slot away"
    tier.apply(a_result(2, 1))
    assert tier.num_used == 0


def test_a_key_stored_again_after_clear_becomes_readable_by_its_new_store_only() -> None:
    tier = OffloadManager(2, LRUPolicy)
    plan_store(tier, "a")
    tier.clear()
    new = store_of(plan_store(tier, "a", first_block=3))
    assert new is not None
    assert tier.num_used == 2
    assert tier.apply(a_result(0, 1)) == []
    assert not tier.lookup("a")
    assert tier.num_used == 1, "the slot of the old store did not come back"
    assert tier.apply(a_result(0, 2)) == ["a"]
    assert tier.num_used == 1
    tier.begin_load("a", [7])
    plan = tier.make_plan(always)
    assert plan is not None
    assert plan.before[0].source_ids == new.target_ids


def test_a_block_of_a_store_from_before_clear_is_still_waited_for() -> None:
    tier = OffloadManager(2, LRUPolicy)
    plan_store(tier, "a", first_block=3)
    tier.clear()
    tier.note_new_blocks([3])
    assert tier.make_plan(always) == a_plan(wait_store=1)


def test_a_plan_goes_through_pickle_unchanged() -> None:
    tier = OffloadManager(4, LRUPolicy)
    store(tier, "ab")
    tier.expose_load(tier.begin_load("a", [5]))
    plan = plan_store(tier, "cd")
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert pickle.loads(pickle.dumps(tier.drained())) == a_result(1, 2)


def test_the_eviction_policy_can_be_replaced() -> None:
    class Newest(LRUPolicy):
        def evict(self, count: int) -> Sequence[Any]:
            newest = [slot for slot, batch in enumerate(self._lists.batch_of) if batch][-count:]
            self.remove(newest)
            return newest

    tier = OffloadManager(2, policy=Newest)
    for key in "abc":
        store(tier, key)
    assert readable(tier, "abc") == "ac"


def test_a_policy_sees_misses_inserts_hits_pins_and_what_is_forgotten_in_the_order_of_use() -> None:
    class Told:
        def __init__(self, key_of: Sequence[Any]) -> None:
            self.key_of = key_of

        def __getattr__(self, name: str) -> Callable[[Iterable[Any]], None]:
            def tell(what: Iterable[Any]) -> None:
                keys = what if name == "miss" else [self.key_of[slot] for slot in what]
                told.append((name, "".join(keys)))

            return tell

    told: list[tuple[str, str]] = []
    tier = OffloadManager(4, policy=Told)
    store(tier, "ab")
    tier.queue_store("a", 5)
    tier.touch("ab")
    tier.begin_load("ab", [7, 8])
    tier.apply(tier.drained())
    tier.discard("b")
    tier.request_ended("abc")
    assert told == [
        ("miss", "ab"), ("insert", "ba"), ("hit", "ba"),
        ("pin", "ba"), ("unpin", "ba"), ("remove", "b"), ("regroup", "a"),
    ]  # fmt: skip


def test_a_request_that_was_stored_in_several_steps_is_evicted_from_its_tail() -> None:
    tier = OffloadManager(3, LRUPolicy)
    for key in "abc":
        store(tier, key)
    tier.request_ended("abc")
    store(tier, "d")
    assert readable(tier, "abcd") == "abd"


def test_the_blocks_of_a_request_are_put_together_once_all_of_them_are_stored() -> None:
    tier = OffloadManager(3, LRUPolicy)
    store(tier, "a")
    store(tier, "b")
    plan_store(tier, "c")
    tier.request_ended("abc")
    tier.apply(tier.drained())
    store(tier, "d")
    assert readable(tier, "abcd") == "abd"


@pytest.mark.parametrize("rests", [None, {"A": "a", "B": "b"}])
def test_what_a_request_of_several_groups_has_stored_is_put_together(rests: Any) -> None:
    tier = OffloadManager(5, LRUPolicy)
    for key in "aAbBx":
        store(tier, key)
    tier.request_ended("aAbB", True, rests)
    assert evict_in_order(tier, "aAbBx") == "xBbAa"


def test_what_is_behind_a_missing_block_is_put_together_where_no_order_is_known() -> None:
    tier = OffloadManager(4, LRUPolicy)
    for key in "abcx":
        store(tier, key)
    tier.discard("b")
    tier.request_ended("abc", True, None)
    assert evict_in_order(tier, "acx?") == "xca"


def test_what_ended_before_a_clear_is_forgotten_with_it() -> None:
    tier = OffloadManager(2, LRUPolicy)
    plan_store(tier, "a")
    tier.request_ended("a")
    tier.clear()
    tier.apply(tier.drained())
    store(tier, "b")
    assert readable(tier, "ab") == "b"


def test_a_block_that_the_step_computes_is_stored_behind_those_that_were_queued() -> None:
    tier = OffloadManager(3, LRUPolicy)
    store(tier, "a")
    tier.queue_store("b", 5)
    plan = tier.make_plan(lambda block, key: block != 9, {"a": 7, "c": 8, "b": 6})
    assert store_of(plan) == a_store(2, (5, 8), (1, 2))


def test_what_a_step_computes_is_stored_without_asking_for_it() -> None:
    tier = OffloadManager(2, LRUPolicy)
    plan = tier.make_plan(lambda block, key: False, {"a": 7, "b": 8, "c": 9})
    assert store_of(plan) == a_store(1, (7, 8), (0, 1))
    assert tier.stats.dropped == 1
    tier.note_new_blocks([8])
    assert tier.make_plan(always).waits_for(STORE) == 1  # type: ignore[union-attr]


def wait_for_more(tier: OffloadManager, key: str, block: int) -> TransferPlan | None:
    """The plan of a step that computes one block, which may wait for those of steps to come."""
    return tier.make_plan(always, {key: block}, can_wait=True)


def test_few_blocks_of_some_steps_are_stored_as_one() -> None:
    tier = OffloadManager(100, LRUPolicy)
    for step in range(TOGETHER_STEPS - 2):
        assert wait_for_more(tier, f"{step}", step) is None
    assert tier.make_plan(always, can_wait=True) is None, "a step that computes no block"
    plan = wait_for_more(tier, "last", 50)
    assert store_of(plan).source_ids == (*range(TOGETHER_STEPS - 2), 50)  # type: ignore[union-attr]
    assert wait_for_more(tier, "next", 51) is None, "it begins again"


def test_many_blocks_wait_for_nothing() -> None:
    tier = OffloadManager(100, LRUPolicy)
    assert wait_for_more(tier, "first", 99) is None
    many = {f"{n}": n for n in range(TOGETHER_BLOCKS - 1)}
    plan = tier.make_plan(always, many, can_wait=True)
    assert store_of(plan).source_ids == (99, *many.values())  # type: ignore[union-attr]


def test_what_waited_is_stored_by_the_first_step_whose_blocks_cannot_wait() -> None:
    tier = OffloadManager(100, LRUPolicy)
    assert wait_for_more(tier, "first", 1) is None
    assert store_of(tier.make_plan(always)).source_ids == (1,)  # type: ignore[union-attr]


def test_what_waited_and_is_handed_out_is_not_stored() -> None:
    tier = OffloadManager(100, LRUPolicy)
    assert wait_for_more(tier, "first", 1) is None
    assert wait_for_more(tier, "second", 2) is None
    tier.note_new_blocks([1])
    assert tier.stats.overwritten == 1
    assert store_of(tier.make_plan(always)).source_ids == (2,)  # type: ignore[union-attr]


def test_what_waited_and_has_lost_its_key_is_not_stored() -> None:
    """The GPU block may hold anything."""
    tier = OffloadManager(100, LRUPolicy)
    assert wait_for_more(tier, "first", 1) is None
    assert wait_for_more(tier, "second", 2) is None
    plan = tier.make_plan(lambda block, key: block != 1)
    assert store_of(plan).source_ids == (2,)  # type: ignore[union-attr]
    assert tier.stats.overwritten == 1


@pytest.mark.parametrize("handed_out", [True, False])
def test_steps_count_from_the_first_block_that_waits(handed_out: bool) -> None:
    tier = OffloadManager(100, LRUPolicy)
    for step in range(TOGETHER_STEPS - 1):
        if handed_out:
            assert wait_for_more(tier, f"{step}", step) is None
        else:
            assert tier.make_plan(always, can_wait=True) is None
    if handed_out:
        tier.note_new_blocks([*range(TOGETHER_STEPS)])
    assert wait_for_more(tier, "next", 50) is None


@pytest.mark.parametrize(("store", "growing"), [("lazy", False), ("eager", True)])
def test_nothing_waits_where_blocks_are_stored_before_the_gpu_loses_them(
    store: str, growing: bool
) -> None:
    tier = OffloadManager(100, LRUPolicy, growing, store)
    leaving = tier.leaving([1], ["a"])
    computed = {} if leaving else {"a": 1}
    plan = tier.make_plan(always, computed, leaving, can_wait=True)
    assert store_of(plan).source_ids == (1,)  # type: ignore[union-attr]


def test_what_the_gpu_is_about_to_lose_does_not_wait_when_being_lazy_ends() -> None:
    """With the very plan that stores it."""
    tier = OffloadManager(100, LRUPolicy, store="auto", gpu_blocks=10)
    assert tier._gain is not None
    tier._gain.pays = True
    assert tier.make_plan(always) is None and tier.lazy
    leaving = tier.leaving([1], ["a"])
    tier._gain.pays = False
    plan = tier.make_plan(always, {}, leaving, can_wait=True)
    assert not tier.lazy
    assert store_of(plan).source_ids == (1,)  # type: ignore[union-attr]


@pytest.mark.parametrize("lost", ["the queue", "the block"])
def test_a_request_that_has_ended_is_told_of_when_what_waited_is_stored_or_lost(lost: str) -> None:
    """Whose keys are not kept either if no store comes any more."""
    tier = OffloadManager(4, LRUPolicy)
    store(tier, "ab")
    wait_for_more(tier, "c", 1)
    tier.request_ended("abc")
    assert tier._ended
    if lost == "the queue":
        tier.drop_queued()
    else:
        tier.note_new_blocks([1])
    tier.apply(tier.drained())
    assert not tier._ended
    tier.request_ended("ab")
    assert not tier._ended


def test_the_tail_of_a_request_leaves_before_its_head_though_it_waited() -> None:
    tier = OffloadManager(3, LRUPolicy)
    store(tier, "ab")
    wait_for_more(tier, "c", 1)
    tier.request_ended("abc")
    assert tier._ended
    tier.make_plan(always)
    tier.apply(tier.drained())
    assert evict_in_order(tier, "abc") == "cba"


def test_what_a_step_computes_waits_for_slots_of_a_growing_tier() -> None:
    tier = OffloadManager(1, LRUPolicy, growing=True)
    assert store_of(tier.make_plan(always, {"a": 7, "b": 8})) == a_store(1, (7,), (0,))
    tier.apply(a_result(0, 1, num_slots=2, growing=True))
    assert store_of(tier.make_plan(always)) == a_store(2, (8,), (1,))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
def test_while_a_tier_grows_what_the_gpu_is_about_to_lose_evicts_and_the_rest_waits(
    policy: type[Any],
) -> None:
    tier = OffloadManager(2, policy, growing=True)
    assert not tier.looks_ahead
    tier.make_plan(always, {"a": 0, "b": 1})
    tier.apply(a_result(0, 1))
    assert tier.make_plan(always, {"c": 2, "d": 3, "e": 4}) is None and tier.looks_ahead
    assert tier.about_to_lose([0, 3, 2, 9], ["a", "d", "other", "z"]) == 0
    assert store_of(tier.make_plan(always)).source_ids == (3,)  # type: ignore[union-attr]
    tier.apply(a_result(0, 2, num_slots=3, growing=True))
    assert store_of(tier.make_plan(always)).source_ids == (2,)  # type: ignore[union-attr]
    assert (tier.stats.evicted, tier.stats.overwritten) == (1, 0)
    tier.about_to_lose([4], ["e"])
    tier.note_new_blocks([4])
    assert tier.stats.overwritten == 1 and not tier.looks_ahead, "it came too late"


@pytest.mark.parametrize("kept", [True, False])
def test_what_the_gpu_is_about_to_lose_is_stored_though_nothing_else_is(kept: bool) -> None:
    tier = OffloadManager(1, LRUPolicy, growing=True)
    store(tier, "a")
    assert tier.make_plan(always, {"b": 1}) is None, "it waits for a slot"
    tier.about_to_lose([1], ["b"])
    plan = tier.make_plan(lambda block, key: kept)
    assert (plan is not None) == kept and tier.stats.overwritten == (not kept)


def test_a_key_that_waits_in_two_gpu_blocks_has_one_slot_when_another_is_usable() -> None:
    """With two, the one that nobody finds would be evicted as if it were the other."""
    tier = OffloadManager(1, LRUPolicy, growing=True)
    plan_store(tier, "aa")
    tier.apply(a_result(0, 1, num_slots=3, growing=True))
    assert store_of(tier.make_plan(always)) is None and tier.num_used == 1


def test_what_is_forgotten_is_not_stored_though_the_gpu_was_about_to_lose_it() -> None:
    """It may be of other weights than what is looked up from now on."""
    tier = OffloadManager(1, LRUPolicy, growing=True)
    store(tier, "a")
    for block, key in enumerate("bc"):
        tier.queue_store(key, block)
    tier.about_to_lose([0], "b")
    tier.clear("weights")
    tier.make_plan(always)
    tier.apply(tier.drained())
    assert readable(tier, "abc") == "" and not tier.num_used


def test_what_cannot_wait_takes_the_free_slots_before_what_can() -> None:
    tier = OffloadManager(3, LRUPolicy, growing=True)
    for key, block in zip("abcd", range(4)):
        tier.queue_store(key, block)
    tier.about_to_lose([3, 2], ["d", "c"])
    assert store_of(tier.make_plan(always)).source_ids == (2, 3, 0)  # type: ignore[union-attr]


# Cost


def fill(tier: OffloadManager, batch: int = 1000) -> None:
    for first in range(0, tier.num_slots, batch):
        store(tier, range(first, first + batch))


def mixed_work(tier: OffloadManager) -> None:
    """Every operation, on a hundred blocks, in a full tier."""
    known = range(tier.num_slots - 100, tier.num_slots)
    tier.touch(known)
    assert all(tier.lookup(key) for key in known)
    tier.note_new_blocks(range(100, 200))
    tier.begin_load(known[:50], range(100, 150))
    plan_store(tier, [("new", i) for i in range(100)])
    tier.note_new_blocks(range(100))
    tier.apply(tier.drained())
    tier.make_plan(always)


def bytecodes(work: Callable[[], None]) -> int:
    """How many bytecodes of the package ``work`` executes, loops that call nothing included."""
    executed = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal executed
        if "kvoffload_patch" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        executed += event == "opcode"
        return trace

    before = sys.gettrace()
    # Python 3.12 reports bytecodes only if a frame has asked for them before tracing begins.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return executed


def filled(num_slots: int) -> OffloadManager:
    tier = OffloadManager(num_slots, LRUPolicy)
    fill(tier)
    return tier


@pytest.fixture(scope="module")
def million() -> OffloadManager:
    return filled(1_000_000)


def test_a_million_blocks_are_stored_and_found(million: OffloadManager) -> None:
    assert million.num_used == million.stats.stored == 1_000_000
    assert all(million.lookup(key) for key in range(1_000_000))
    assert not million.lookup(1_000_000)


def test_an_operation_costs_the_same_at_a_thousand_and_at_a_million_slots(
    million: OffloadManager,
) -> None:
    small = filled(1000)
    costs: Sequence[int] = [bytecodes(lambda t=t: mixed_work(t)) for t in (small, million)]
    # The slot pool has one bin for each bit of its capacity: ten more at a million.
    # What is left of a batch is gathered now and then, more often where all of it is used.
    assert 1000 < costs[0] <= 2 * costs[1]
    assert costs[1] <= costs[0] + 200


def test_a_million_blocks_are_evicted_by_the_next_million(million: OffloadManager) -> None:
    for first in range(0, 1_000_000, 10_000):
        store(million, [-1 - key for key in range(first, first + 10_000)])
    assert not any(million.lookup(key) for key in range(1_000_000))
    assert all(million.lookup(-1 - key) for key in range(1_000_000))
    assert million.num_used == 1_000_000


def test_a_discarded_key_is_gone_and_its_slot_is_free() -> None:
    tier = OffloadManager(2, LRUPolicy)
    store(tier, "ab")
    tier.discard("a")
    tier.discard("never stored")
    assert readable(tier, "ab") == "b" and tier.num_used == 1
    store(tier, "c")
    assert readable(tier, "abc") == "bc" and tier.stats.evicted == 0


@pytest.mark.parametrize("lost", [None, "d", "l"])
def test_keys_in_neighbouring_slots_are_found_but_for_those_that_left(lost: str | None) -> None:
    tier = OffloadManager(20, LRUPolicy)
    keys: list[Any] = [*"abcdefghijkl"]
    store(tier, keys)
    if lost is None:
        keys.append(None)  # a slot that was never used holds no such key
    else:
        tier.discard(lost)
    with pytest.raises(KeyError):
        tier.begin_load(keys, range(len(keys)))
    keys.remove(lost)
    tier.begin_load(keys, range(len(keys)))
    (load,) = tier.loads_to_plan
    assert [tier._key_of[slot] for slot in load.source_ids] == keys


def test_a_key_discarded_while_it_is_stored_never_becomes_readable() -> None:
    tier = OffloadManager(2, LRUPolicy)
    plan_store(tier, "a")
    tier.discard("a")
    assert tier.num_used == 1, "the slot is being written"
    assert tier.apply(tier.drained()) == []
    assert not tier.lookup("a") and tier.num_used == 0


def test_a_key_discarded_while_it_is_loaded_keeps_its_slot_until_that_is_done() -> None:
    tier = OffloadManager(1, LRUPolicy)
    store(tier, "a")
    tier.begin_load("a", [9])
    tier.discard("a")
    assert store_of(plan_store(tier, "b")) is None
    tier.apply(tier.drained())
    store(tier, "c")
    assert readable(tier, "abc") == "c"


def test_slots_that_become_usable_are_used_and_kept() -> None:
    tier = OffloadManager(2, LRUPolicy)
    store(tier, "ab")
    tier.apply(a_result(0, 1, num_slots=5))
    assert (tier.num_slots, tier.num_used) == (5, 2)
    plan = plan_store(tier, "cde", first_block=10)
    assert store_of(plan) is not None and sorted(store_of(plan).target_ids) == [2, 3, 4]
    tier.apply(tier.drained())
    assert readable(tier, "abcde") == "abcde"
    tier.apply(a_result(0, 0, num_slots=3))  # an older result
    assert tier.num_slots == 5
    tier.clear()
    assert len(store_of(store(tier, "vwxyz")).target_ids) == 5  # type: ignore[union-attr]
    assert tier.stats.evicted == 0


def test_fewer_slots_forget_what_is_behind_them_and_late_copies_do_not_bring_it_back() -> None:
    tier = OffloadManager(4, LRUPolicy)
    assert store_of(tier.make_plan(always, {key: block for block, key in enumerate("abcd")}))
    tier.apply(a_result(0, 1))
    slot_of = dict(tier._slot_of)
    kept = [key for key, slot in slot_of.items() if slot < 2]
    lost = [key for key, slot in slot_of.items() if slot >= 2]
    ticket = tier.begin_load(lost[:1], [7])
    sizing = tier.resize(2)
    assert [tier.holds(key) for key in kept + lost] == [True, True, False, False]
    assert (tier.num_slots, tier.num_used) == (2, 2)
    tier.apply(a_result(0, 1, num_slots=4))
    assert tier.num_slots == 2, "said before every rank had given its memory back"
    tier.apply(a_result(0, 1, num_slots=4, sizing=sizing))
    assert (tier.num_slots, tier.num_used) == (4, 3), "a load still reads one of them"
    tier.apply(a_result(ticket, 1))
    assert tier.num_used == 2 and all(map(tier.lookup, kept))


@pytest.mark.parametrize("policy", POLICIES)
def test_fewer_slots_cost_little_for_each_and_one_event(policy: str) -> None:
    """An engine stands still meanwhile: a tier can have millions."""
    tier, told = OffloadManager(10_000, POLICIES[policy]), list[list[Hashable]]()
    fill(tier)
    for first in range(0, 10_000, 1000):
        tier.request_ended(range(first, first + 1000))
    tier.on_left = lambda keys: told.append(list(keys))
    slot_of = dict(tier._slot_of)
    assert bytecodes(lambda: tier.resize(5_000)) < 150 * 10_000
    assert sorted(told[0]) == sorted(key for key, slot in slot_of.items() if slot >= 5_000)
    assert len(told) == 1 and tier.stats.removed["resized"] == len(told[0]) == 5_000
    assert tier.num_used == 5_000 and not tier._slots.num_free
    store(tier, ["new"])
    assert tier.num_used == 5_000 and tier.stats.evicted == 1


def test_a_slot_behind_the_last_one_does_not_come_back_when_what_used_it_is_done() -> None:
    tier = OffloadManager(4, LRUPolicy)
    store(tier, "abcd")
    lost = next(key for key, slot in tier._slot_of.items() if slot == 3)
    tier.begin_load([lost], [7])
    tier.resize(2)
    tier.apply(tier.drained())
    assert (tier.num_slots, tier.num_used) == (2, 2)
    plan = plan_store(tier, "xy", first_block=10)
    assert store_of(plan) is not None and sorted(store_of(plan).target_ids) == [0, 1]


def test_another_policy_evicts_what_the_one_before_would_have() -> None:
    tier = OffloadManager(3, LRUPolicy)
    for number, key in enumerate("abc"):
        tier.make_plan(always, {key: number})
        tier.apply(a_result(0, number + 1))
    tier.touch(["a"])
    tier.change_policy(POLICIES["arc"])
    tier.make_plan(always, {"d": 5})
    assert [tier.holds(key) for key in "abcd"] == [True, False, True, True]


@pytest.mark.parametrize("change", ["policy", "size"])
def test_what_was_used_least_recently_leaves_first_after_a_change_as_before(change: str) -> None:
    tier = OffloadManager(6, POLICIES["adaptive"])
    store(tier, "abc")
    tier.touch("a")
    store(tier, "def")
    if change == "policy":
        tier.change_policy(POLICIES["lru"])
    else:
        tier.resize(5)
    left = readable(tier, "cbafed")
    assert evict_in_order(tier, left) == left


class Compared:
    """A key that counts how often one is compared."""

    times = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return isinstance(other, Compared) and other.number == self.number


def test_a_prefix_in_short_runs_of_slots_is_found_in_a_look_at_each_block() -> None:
    """Prompts that are computed side by side have their blocks in turns."""
    prompts = [[Compared(1000 * one + n) for n in range(640)] for one in range(4)]
    tier = OffloadManager(4 * 640, LRUPolicy)
    for at in range(0, 640, 16):
        store(tier, [key for keys in prompts for key in keys[at : at + 16]])
    asked = [Compared(2000 + n) for n in range(640)]
    Compared.times = 0
    pieces = tier._find_pieces(asked)
    assert [slot for piece in pieces for slot in piece] == [tier._slot_of[key] for key in asked]
    assert len(pieces) == 40 and Compared.times < 4 * 640
