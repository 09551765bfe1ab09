"""Transfers that failed: nothing of them is readable, every slot comes back, and once only."""

from __future__ import annotations

from tier.plans import a_result

from kvoffload_patch.links import RAISED, STORE
from kvoffload_patch.plan import TransferPlan
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies.lru import LRUPolicy


def always(gpu_block_id: int, key: object) -> bool:
    return True


def plan_store(tier: OffloadManager, keys: str) -> None:
    for block, key in enumerate(keys):
        tier.queue_store(key, block)
    assert tier.make_plan(always) is not None


def stored(keys: str, num_slots: int = 4) -> OffloadManager:
    """A tier that holds these keys."""
    tier = OffloadManager(num_slots, LRUPolicy)
    plan_store(tier, keys)
    tier.apply(tier.drained())
    return tier


def readable(tier: OffloadManager, keys: str) -> str:
    return "".join(key for key in keys if tier.lookup(key))


def test_a_failed_store_is_forgotten() -> None:
    tier = OffloadManager(4, LRUPolicy)
    plan_store(tier, "ab")
    assert tier.apply(a_result(0, 1, failed_stores=(1,))) == []
    assert readable(tier, "ab") == "" and not tier.holds("a")
    assert tier.num_used == 0 and not tier.busy
    assert (tier.stats.stored, tier.stats.failed) == (0, 2)
    plan_store(tier, "ab")
    assert sorted(tier.apply(a_result(0, 2, failed_stores=(1,)))) == ["a", "b"]


def test_only_the_store_that_failed_is_forgotten() -> None:
    tier = OffloadManager(4, LRUPolicy)
    for keys in ("a", "b", "c"):
        plan_store(tier, keys)
    assert tier.apply(a_result(0, 3, failed_stores=(2,))) == ["a", "c"]
    assert (tier.num_used, tier.stats.failed) == (2, 1)


def test_a_failure_reported_again_is_harmless() -> None:
    tier = stored("ab")
    ticket = tier.begin_load("a", [7])
    result = a_result(ticket, 1, failed_loads=(ticket,))
    tier.apply(result)
    plan_store(tier, "a")  # again, elsewhere
    tier.apply(a_result(ticket, 2, failed_loads=(ticket,)))
    tier.apply(result)
    assert readable(tier, "ab") == "ab"
    assert tier.stats.failed == 1


def test_a_failed_load_takes_its_keys_along() -> None:
    tier = stored("abc")
    tier.begin_load("ab", [7, 8])
    tier.apply(a_result(1, 1, failed_loads=(1,)))
    assert tier.load_done(1) and tier.load_failed(1)
    assert readable(tier, "abc") == "c"
    assert tier.num_used == 1 and not tier.busy
    assert (tier.stats.loaded, tier.stats.failed) == (0, 2)


def test_another_load_of_a_failed_ones_keys_keeps_their_slots_until_it_is_done() -> None:
    tier = stored("ab")
    first, second = tier.begin_load("ab", [5, 6]), tier.begin_load("a", [7])
    tier.apply(a_result(first, 1, failed_loads=(first,)))
    assert readable(tier, "ab") == "" and tier.num_used == 1
    tier.apply(a_result(second, 1, failed_loads=(first,)))
    assert not tier.load_failed(second)
    assert readable(tier, "ab") == "" and tier.num_used == 0


def test_a_load_known_to_have_failed_before_it_is_done_is_not_counted_before() -> None:
    tier = stored("a")
    ticket = tier.begin_load("a", [5])
    tier.apply(a_result(0, 1, failed_loads=(ticket,)))
    assert tier.load_failed(ticket) and not tier.load_done(ticket)
    assert tier.stats.failed == 0 and tier.num_used == 1
    tier.apply(a_result(ticket, 1, failed_loads=(ticket,)))
    assert tier.load_failed(ticket) and tier.stats.failed == 1 and tier.num_used == 0


def test_what_failed_is_not_remembered_for_ever() -> None:
    tier = OffloadManager(4, LRUPolicy)
    for _ in range(50):
        plan_store(tier, "a")
        tier.apply(tier.drained())
        ticket = tier.begin_load("a", [9])
        stores = tier.drained().done_on(STORE)
        tier.apply(a_result(ticket, stores, failed_loads=(ticket,), failed_stores=(stores,)))
    assert len(tier._loads.failed) <= 1 and len(tier._stores.failed) <= 1
    plan_store(tier, "b")
    assert not (tier._loads.failed or tier._stores.failed)


def test_ranks_hear_that_a_failure_is_known_though_nothing_moves() -> None:
    """Each names it until then, and one of several says no more of what it has done."""
    tier = OffloadManager(4, LRUPolicy)
    plan_store(tier, "ab")
    tier.apply(a_result(0, 1, failed_stores=(1,)))
    assert tier.make_plan(always) == TransferPlan(done=((STORE, 1),))
    tier.apply(a_result(0, 1, failed_stores=(1,)))
    assert tier.make_plan(always) is None, "once"


def test_a_failed_transfer_gives_its_slots_back_after_clear() -> None:
    tier = stored("ab")
    tier.begin_load("a", [5])
    plan_store(tier, "c")
    tier.clear()
    tier.apply(a_result(1, 2, failed_loads=(1,), failed_stores=(2,)))
    assert tier.num_used == 0
    plan_store(tier, "abcd")
    tier.apply(tier.drained())
    assert readable(tier, "abcd") == "abcd"


def test_what_leaves_the_tier_is_counted_with_the_reason() -> None:
    tier = stored("abcdef", num_slots=6)
    ticket = tier.begin_load("ab", [7, 8])
    tier.apply(a_result(ticket, 1, failed_loads=(ticket,)))
    plan_store(tier, "x")
    tier.apply(a_result(ticket, 2, failed_stores=(2,)))
    tier.discard("c")
    tier.resize(max(tier._slot_of.values()))  # one of those left
    plan_store(tier, "y")
    tier.clear("weights")
    tier.clear("emptied")
    tier.discard("never stored")
    stats = tier.stats
    assert stats.removed == {
        "reset": 0, "emptied": 0, "weights": 3, "resized": 1, "failed": 3, "invalid": 1,
    }  # fmt: skip
    tier.apply(tier.drained())
    failed = stats.failed_by[STORE, RAISED].blocks
    assert stats.stored + failed == stats.evicted + sum(stats.removed.values())
