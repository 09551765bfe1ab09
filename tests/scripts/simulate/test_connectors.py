"""The connectors' rules as their documents and sources have them."""

from __future__ import annotations

from tier.plans import a_result, store_of

from scripts.simulate.connectors import (
    ConnectorArc,
    InOrder,
    OffloadingArc,
    OffloadingLru,
    SimpleEager,
    SimpleLazy,
)
from scripts.simulate.gpu import GpuPool
from scripts.simulate.rules import Rules, Run
from scripts.simulate.trace import Request


def admitted(rules: Rules, keys: tuple[int, ...], on_gpu: int, hit: int) -> Run:
    request = Request(0.0, 4 * len(keys) + 1, 1, keys)
    run = Run(0, request, list(range(len(keys) + 1)), hit, on_gpu, 0, 0, hit)
    rules.admitted(run)
    return run


def stored(rules: Rules, *keys: int) -> None:
    """These are stored in one step, and can be evicted."""
    rules.manager.make_plan(lambda *_: True, {key: key for key in keys})
    rules.manager.apply(rules.manager.drained())


def held(rules: Rules) -> set[int]:
    return {key for key in range(100) if rules.manager.holds(key)}


def test_simple_evicts_a_head_before_its_tail_and_a_gpu_hit_is_no_use() -> None:
    rules = SimpleEager(4)
    stored(rules, 1, 2)
    stored(rules, 3, 4)
    admitted(rules, (1, 2), on_gpu=2, hit=2)
    stored(rules, 5)
    assert held(rules) == {2, 3, 4, 5}


def test_simple_stores_again_what_a_request_found_on_the_gpu_and_the_cpu_lacks() -> None:
    rules = SimpleEager(4)
    admitted(rules, (1, 2), on_gpu=1, hit=1)
    assert store_of(rules.manager.make_plan(lambda *_: True)).source_ids == (0,)


def test_lazy_stores_what_nobody_uses_and_makes_it_the_last_to_be_reused() -> None:
    gpu, rules = GpuPool(4), SimpleLazy(4, near=2)
    blocks = gpu.allocate(4)
    for key, block in zip((1, 2, 3, 4), blocks):
        gpu.cache(key, block)
    run = Run(0, Request(0.0, 17, 1, (1, 2, 3, 4)), blocks, 0, 0, 0, 0, 0)
    assert rules.computed(run, (1, 2), (0, 1)) == {}
    rules.step(gpu, gpu.release([3, 2, 1]))
    plan = rules.manager.make_plan(lambda *_: True)
    assert store_of(plan).source_ids == (3, 2)
    assert list(gpu.free) == [1, 3, 2]
    rules.step(gpu, [])
    assert store_of(rules.manager.make_plan(lambda *_: True)).source_ids == (1,)


def test_a_block_in_use_is_never_stored_lazily() -> None:
    gpu, rules = GpuPool(2), SimpleLazy(4, near=2)
    blocks = gpu.allocate(2)
    for block in blocks:
        gpu.cache(block, block)
    idle = gpu.release([1])
    gpu.hold([1])
    rules.step(gpu, idle)
    assert rules.manager.make_plan(lambda *_: True) is None


def test_offloading_makes_what_a_request_stored_recent_when_it_ends_tail_first() -> None:
    rules = OffloadingLru(4)
    run = admitted(rules, (1, 2), on_gpu=0, hit=0)
    assert rules.computed(run, (1, 2), (0, 1)) == {1: 0, 2: 1}
    stored(rules, 1)
    stored(rules, 2)
    stored(rules, 3, 4)
    rules.ended(run)
    stored(rules, 5, 6)
    assert held(rules) == {1, 2, 5, 6}
    stored(rules, 7)
    assert held(rules) == {1, 5, 6, 7}


def test_offloading_stores_no_answers_and_offers_no_gpu_hit_beside_a_load() -> None:
    rules = OffloadingLru(4)
    stored(rules, 2)
    run = admitted(rules, (1, 2), on_gpu=1, hit=2)
    rules.answered(run, 9, 5)
    assert rules.manager.make_plan(lambda *_: True) is None
    assert (run.reused, run.stored) == ([2], [])
    run = admitted(rules, (1, 2), on_gpu=2, hit=2)
    assert (run.reused, run.stored) == ([2], [1]), "without a load, both are offered"


def test_arc_keeps_what_a_second_request_used() -> None:
    rules = OffloadingArc(3)
    stored(rules, 1, 2)
    run = admitted(rules, (1,), on_gpu=1, hit=1)
    rules.ended(run)
    stored(rules, 3)
    stored(rules, 4, 5)
    assert held(rules) == {1, 4, 5}


def test_arc_gives_the_first_list_more_when_what_it_lost_comes_again() -> None:
    key_of = ["a", "b"]
    arc = ConnectorArc(key_of)
    arc.insert([0, 1])
    assert arc.evict(2) == [0, 1]
    arc.miss(["a"])
    arc.insert([0])
    arc.hit([0])
    key_of[1] = "c"
    arc.insert([1])
    assert arc.evict(1) == [1], "its share is 1, and it has 1"
    arc.miss(["b"])
    arc.insert([1])
    assert arc.evict(1) == [0], "its share is 2"


def test_pinned_keys_are_not_evicted_and_keep_their_place() -> None:
    policy = InOrder([])
    policy.insert([1, 2, 3])
    policy.pin([1])
    assert policy.evict(1) == [2]
    policy.unpin([1])
    assert policy.evict(3) == [1, 3]
    policy.insert([4])
    policy.remove([4, 5])
    assert policy.evict(1) == []


def test_a_load_of_simple_ends_with_its_tail_the_most_recent() -> None:
    policy = InOrder([], head_first=True)
    policy.insert([3, 2, 1])  # as the manager gives them, the head last
    policy.pin([2, 1])
    policy.unpin([2, 1])
    assert policy.evict(3) == [3, 1, 2]


def test_results_have_both_directions() -> None:
    assert OffloadingLru(1).manager.drained() == a_result(0, 0)
