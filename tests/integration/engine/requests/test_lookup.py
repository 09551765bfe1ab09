"""Probing, loading and storing over vLLM's own KV cache manager, block pool and requests."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import BLOCK as MINI_BLOCK
from integration.engine.mini import Mini
from integration.engine.world import (
    BLOCK,
    LookUps,
    World,
    make_request,
    prompt,
    step_output,
)
from scheduler_half import parts
from scheduler_half.drafts import Drafter
from scheduler_half.scenarios import prompt as mini_prompt
from scheduler_half.states import STATE
from tier.plans import a_result, store_of
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from kvoffload_patch.integration.engine import step_hooks
from kvoffload_patch.integration.engine.requests.lookup import LookupResult
from kvoffload_patch.integration.protocol import PLAN
from kvoffload_patch.links import LOAD, STORE
from kvoffload_patch.plan import Transfer, TransferResult

PARKED = RequestStatus.WAITING_FOR_REMOTE_KVS
WAITING = RequestStatus.WAITING


@pytest.fixture
def look_ups(monkeypatch: pytest.MonkeyPatch) -> LookUps:
    """Counts the lookups of this test."""
    return LookUps(monkeypatch)


def add_many(world: World, count: int, first_seed: int = 1) -> list[Request]:
    """Requests that wait and have nothing in common: four blocks and a token each."""
    return [world.add(prompt(4, seed=seed)) for seed in range(first_seed, first_seed + count)]


def remembered(world: World) -> set[str]:
    """Requests whose lookup need not be repeated."""
    lookups = world.tier._lookups
    return {*lookups._new, *lookups._results}


# Bounded probing

LIMITS = {
    "requests": ({"max_running": 6}, 6),
    "tokens": ({"max_tokens": 3 * (4 * BLOCK + 1)}, 3),
    "blocks": ({"num_blocks": 1 + 4 * 5 + 2}, 5),  # four fit, one is found not to
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_step_looks_up_no_more_than_it_can_admit(limit: str, look_ups: LookUps) -> None:
    setting, expected = LIMITS[limit]
    counts = {}
    for num_waiting in (10, 2000):
        world = World(**setting)
        requests = add_many(world, num_waiting)
        world.tier.before_schedule()
        looked_up, blocks = look_ups.take()
        assert looked_up == requests[: len(looked_up)]
        counts[num_waiting] = (len(looked_up), blocks)
    assert counts[10] == counts[2000]
    assert counts[10][0] == expected


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_a_step_looks_up_no_more_of_what_the_tier_has(load_mode: str, look_ups: LookUps) -> None:
    counts = {}
    for num_waiting in (200, 2000):
        world = World(num_blocks=21, load_mode=load_mode)
        world.only_in_cpu(prompt(4))
        world.add(prompt(4))
        add_many(world, num_waiting)
        look_ups.take()
        world.tier.before_schedule()
        looked_up, blocks = look_ups.take()
        counts[num_waiting] = (len(looked_up), blocks)
    assert counts[200] == counts[2000]
    assert counts[200][0] <= 64 + world.scheduler.max_num_running_reqs


def test_nothing_is_looked_up_twice_while_nothing_changes(look_ups: LookUps) -> None:
    world = World(max_running=6)
    requests = add_many(world, 20)
    world.step()
    assert look_ups.take()[0] == requests[:6]
    world.step()
    assert look_ups.take() == ([], 0)


def test_one_that_does_not_fit_is_not_looked_up_twice_either(look_ups: LookUps) -> None:
    world = World(num_blocks=1 + 4 * 5 + 2)
    requests = add_many(world, 20)
    world.step()
    assert look_ups.take()[0] == requests[:5]
    world.step()
    assert look_ups.take() == ([], 0)


def test_those_that_do_not_fit_beside_a_parked_load_are_not_looked_up_twice(
    look_ups: LookUps,
) -> None:
    world = World(num_blocks=1 + 4 * 5, load_mode="parked")
    world.only_in_cpu(prompt(4))
    world.add(prompt(4))
    add_many(world, 20)
    look_ups.take()
    world.step()
    first = look_ups.take()[0]
    world.step()
    assert [r for r in look_ups.take()[0] if r in first] == []


def test_a_longer_request_is_looked_up_again(look_ups: LookUps) -> None:
    world = World()
    runs, first, second = add_many(world, 3)
    world.step(runs)
    look_ups.take()
    second.append_output_token_ids(7)
    world.step()
    assert look_ups.take()[0] == [second]
    assert first.request_id in world.tier._lookups._results


def test_exactly_those_that_lacked_a_key_are_looked_up_again(look_ups: LookUps) -> None:
    world = World(num_blocks=65)
    stored, alike, other, late = (world.add(prompt(3, seed=s)) for s in (1, 1, 2, 3))
    world.step(stored)
    world.end(stored)
    world.flush_gpu()
    assert look_ups.take()[0] == [stored, alike, other, late]
    world.step()
    assert look_ups.take()[0] == [], "nothing is readable yet"
    world.all_done()
    world.tier.before_schedule()
    assert look_ups.take()[0] == [alike]
    assert world.gpu_hit(alike) == 3 * BLOCK
    assert all(world.tier._lookups.get(r.request_id, r.num_tokens) for r in (other, late))


def test_a_hit_is_looked_up_again_once_its_block_is_handed_out(look_ups: LookUps) -> None:
    world = World(num_blocks=33)
    first = world.add(prompt(3, seed=1))
    world.step(first)
    world.end(first)
    alike, other = world.add(prompt(3, seed=1)), world.add(prompt(3, seed=2))
    world.step()
    look_ups.take()
    unused = world.pool.get_num_free_blocks() - 3
    taken = world.pool.get_new_blocks(unused)
    world.step()
    assert look_ups.take()[0] == []
    world.pool.get_new_blocks(1)
    world.tier.before_schedule()
    assert look_ups.take()[0] == [alike]
    assert world.tier._lookups.get(other.request_id, other.num_tokens)
    world.pool.free_blocks(taken)


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_nothing_is_looked_up_while_paused(state: PauseState, look_ups: LookUps) -> None:
    world = World(load_mode="parked")
    world.only_in_cpu(prompt(4))
    parked, other = world.add(prompt(4)), world.add(prompt(4, seed=5))
    world.step()
    world.all_done()
    look_ups.take()
    world.scheduler.pause_state = state
    third = world.add(prompt(4, seed=6))
    world.tier.before_schedule()
    assert look_ups.take()[0] == []
    assert world.gpu_hit(parked) == 4 * BLOCK, "what has arrived is published all the same"
    world.step()
    world.scheduler.pause_state = PauseState.UNPAUSED
    world.step()
    assert look_ups.take()[0] == [third], "what its load has brought the other knows already"
    assert world.tier._lookups.get(other.request_id, other.num_tokens)


def test_an_admitted_request_is_forgotten() -> None:
    world = World()
    request, other = add_many(world, 2)
    world.step()
    world.step(request)
    assert set(world.tier._lookups._results) == {other.request_id}
    assert [*world.tier._hits._looked_up] == [other.request_id]


def test_one_that_was_found_not_to_fit_and_is_admitted_all_the_same_is_forgotten() -> None:
    world = World(num_blocks=1 + 4 * 5 + 2)
    requests = add_many(world, 5)
    world.step(requests[4])
    assert requests[4].request_id not in world.tier._lookups._results
    assert requests[4].request_id not in world.tier._hits._looked_up


# Inline loads


def test_an_inline_load_can_be_used_in_its_own_step() -> None:
    world = World(load_mode="inline")
    world.only_in_cpu(prompt(4))
    request = world.add(prompt(4))
    free = world.pool.get_num_free_blocks()
    world.tier.before_schedule()
    assert request.status == WAITING
    blocks, hit, _ = world.manager.get_computed_blocks(request)
    assert hit == 4 * BLOCK
    assert [block.ref_cnt for block in blocks.blocks[0]] == [1] * 4
    assert world.pool.get_num_free_blocks() == free - 4
    world.flush_gpu()  # allocations within schedule() cannot take them
    assert world.gpu_hit(request) == 4 * BLOCK
    plan = world.step()
    assert world.pool.get_num_free_blocks() == free
    assert world.gpu_hit(request) == 4 * BLOCK
    (load,) = plan.before
    assert load.target_ids == tuple(block.block_id for block in blocks.blocks[0])
    assert plan.waits_for(LOAD) == load.ticket


def test_an_inline_load_goes_where_the_store_came_from() -> None:
    world = World(load_mode="inline")
    request = world.add(prompt(4))
    store = store_of(world.step(request))
    keys = [world.pool.blocks[block_id].block_hash for block_id in store.source_ids]
    slot_of = dict(zip(keys, store.target_ids))
    world.all_done()
    world.end(request)
    world.flush_gpu()
    again = world.add(prompt(4))
    (load,) = world.step(again).before
    loaded = [world.pool.blocks[block_id].block_hash for block_id in load.target_ids]
    assert loaded == world.hash_keys(again)
    assert load.source_ids == tuple(slot_of[key] for key in loaded)


def test_only_what_the_gpu_lacks_is_loaded() -> None:
    world = World(load_mode="inline")
    world.only_in_cpu(prompt(4))
    shorter = world.add(prompt(2))
    world.step(shorter)
    world.view.prefix_stats.enable()  # from zero
    longer = world.add(prompt(4))
    (load,) = world.step(longer).before
    assert len(load.target_ids) == 2
    stats = world.scheduler.connector_prefix_cache_stats
    assert (stats.queries, stats.hits) == (longer.num_tokens - 2 * BLOCK, 2 * BLOCK)


def test_a_prefix_on_the_gpu_is_kept_while_the_rest_is_loaded() -> None:
    """The free queue's oldest blocks are the prefix: the load must not take those."""
    world = World(num_blocks=9, load_mode="inline")
    world.only_in_cpu(prompt(4))
    shorter = world.add(prompt(2, tail=1))
    world.step(shorter)
    world.end(shorter)
    blocks = world.pool.get_new_blocks(world.pool.get_num_free_blocks() - 2 - 3)
    longer = world.add(prompt(4))
    assert world.gpu_hit(longer) == 2 * BLOCK
    world.step()
    assert world.gpu_hit(longer) == 4 * BLOCK
    world.pool.free_blocks(blocks)


def test_a_load_leaves_the_gpu_hits_of_requests_before_it() -> None:
    """The free queue's oldest blocks are what the request before hits on the GPU."""
    world = World(num_blocks=1 + 10, load_mode="inline")
    world.only_in_cpu(prompt(4, seed=1))
    first = world.add(prompt(4, seed=2))
    world.step(first)
    world.end(first)
    newer = world.add(prompt(5, seed=3, tail=0))
    world.step(newer)
    world.end(newer)
    before, behind = world.add(prompt(4, seed=2)), world.add(prompt(4, seed=1))
    hits = []
    world.step(body=lambda: hits.extend([world.gpu_hit(before), world.gpu_hit(behind)]))
    assert hits == [4 * BLOCK, 4 * BLOCK]


# Several KV cache groups


def two_groups(load_mode: str, seed: int, blocks: int = 6) -> Mini:
    """Full attention and a window of 40 tokens; the tier alone has a prompt, in both groups."""
    mini = Mini(load_mode=load_mode, windows=(None, 40), blocks=49)
    mini.only_in_cpu(mini_prompt(blocks, seed))
    return mini


def keys_of_groups(mini: Mini, tokens: list[int]) -> list[list[Any]]:
    """The keys of a prompt's full blocks, for each group."""
    hashes = parts.make_request("asked", tokens, 1).block_hashes
    return [[mini.view.key(block_hash, group) for block_hash in hashes] for group in (0, 1)]


@pytest.mark.parametrize("on_gpu", [(True, False, True, False), (False, True, False, True)])
def test_what_the_gpu_lacks_is_loaded_wherever_it_is_in_the_prefix(on_gpu: Any) -> None:
    """Blocks of the tier between those of the GPU, and of the GPU between those of the tier."""
    mini = Mini(load_mode="inline")
    asked = mini_prompt(4, seed=1)
    mini.add(asked, count=1)
    mini.run()
    mini.settle()
    find = mini.view.gpu_lookup()
    for key, kept in zip(keys_of_groups(mini, asked)[0], on_gpu):
        if not kept:
            mini.pool._maybe_evict_cached_block(find(key))
    name = mini.add(asked, count=1)
    mini.run()
    mini.settle()
    mini.check()
    assert (mini.hits[name], mini.manager.stats.loaded) == (4 * MINI_BLOCK, 2)


def places(mini: Mini, asked: list[int], seed: int) -> None:
    """Each block of a prompt goes somewhere else: GPU and tier, tier alone, GPU alone, nowhere."""
    mini.add(asked, count=1)
    mini.run()
    mini.settle()
    rng, find = random.Random(seed), mini.view.gpu_lookup()
    for key in keys_of_groups(mini, asked)[0]:
        where = rng.choices(("both", "tier", "gpu", "none"), (4, 12, 2, 1))[0]
        if where in ("tier", "none"):
            mini.pool._maybe_evict_cached_block(find(key))
        if where in ("gpu", "none"):
            mini.manager.discard(key)


def said(result: Any) -> tuple[Any, ...]:
    """What a lookup has found."""
    found, at = result.search and result.search.groups, list(result.positions)
    return result.tokens, result.gpu_tokens, result.gpu_blocks, result.keys, list(result.ends), (
        result.missing, result.cut_short, found, at
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_blocks_that_are_looked_for_at_once_are_those_found_one_by_one(seed: int) -> None:
    mini, asked = Mini(load_mode="inline"), mini_prompt(9, seed=seed)
    places(mini, asked, seed)
    request, pool = parts.make_request("asked", asked, 1), mini.tier._admission._pool
    for most in (1, 2, 5, 20):
        at_once = pool.look_up(request, most)
        mini.view.gpu_lacks = lambda keys: False
        assert said(pool.look_up(request, most)) == said(at_once)
        mini.view.gpu_lacks = mini.view.adapter.lacks


def test_a_prefix_that_the_tier_alone_has_is_looked_for_at_once() -> None:
    mini, asked = Mini(load_mode="inline"), mini_prompt(9, seed=1)
    mini.only_in_cpu(asked)
    pool, made = mini.tier._admission._pool, []
    pool._key, key = lambda *of: made.append(of) or key(*of), pool._key
    result = pool.look_up(parts.make_request("asked", asked, 1), 20)
    assert len(result.keys) >= 8 and len(made) <= 2, "keys were made one by one"


def test_where_vllm_asks_in_another_order_each_block_is_looked_for_by_itself() -> None:
    mini, asked = Mini(load_mode="inline"), mini_prompt(4, seed=1)
    mini.only_in_cpu(asked)
    request, pool = parts.make_request("asked", asked, 1), mini.tier._admission._pool
    result, hashes = LookupResult(0), request.block_hashes
    find = pool._in_order(result, hashes, 20, [])
    for at in (0, 2, 1, 3):
        assert find(hashes[at], [0])
    keys = keys_of_groups(mini, asked)[0]
    assert result.keys == [keys[at] for at in (0, 2, 1, 3)]


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_what_one_group_has_beyond_the_other_is_not_told_to_vllm(load_mode: str) -> None:
    """It is not loaded. That the lookup saw it must not come out as vLLM's own lookup's number."""
    mini = two_groups(load_mode, seed=1)
    asked = mini_prompt(6, seed=1)
    for key in keys_of_groups(mini, asked)[1][4:]:
        mini.manager.discard(key)
    name = mini.add(asked, count=3)
    mini.run()  # compares what vLLM is given with its own lookup
    mini.check()
    assert mini.hits[name] == 4 * MINI_BLOCK


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_blocks_of_several_groups_are_loaded_in_prefix_order(load_mode: str) -> None:
    """So that the tier evicts a prefix from its tail, in all groups, when they are done."""
    mini = two_groups(load_mode, seed=2)
    full, window = keys_of_groups(mini, mini_prompt(6, seed=2))
    loaded: list[Any] = []
    begin_load = mini.manager.begin_load
    mini.manager.begin_load = lambda keys, *more: loaded.extend(keys) or begin_load(keys, *more)
    mini.add(mini_prompt(6, seed=2), count=1)
    mini.run()
    assert loaded == [full[0], full[1], full[2], *sum(zip(full[3:], window[3:]), ())]
    assert mini.manager.stats.loaded == 9


def test_a_window_needs_no_room_for_what_it_does_not_see() -> None:
    mini = Mini(load_mode="inline", windows=(None, 40), blocks=57)
    mini.only_in_cpu(mini_prompt(30, seed=3))
    running = mini.add(mini_prompt(1, seed=4), count=60)
    mini.step()
    name = mini.add(mini_prompt(30, seed=3), count=2)
    assert mini.pool.get_num_free_blocks() < 2 * 31, "there is no room for all of both groups"
    mini.step()
    assert mini.hits[name] == 30 * MINI_BLOCK and running in mini.scheduler.requests
    mini.run()
    mini.check()


# Parked loads


def test_a_parked_load_is_published_when_its_ticket_is_done() -> None:
    world = World(load_mode="parked")
    world.only_in_cpu(prompt(4))
    request = world.add(prompt(4))
    free = world.pool.get_num_free_blocks()
    (load,) = world.step().before
    assert request.status == PARKED
    assert world.pool.get_num_free_blocks() == free - 4
    world.flush_gpu()
    assert world.step() is None
    assert (request.status, world.gpu_hit(request)) == (PARKED, 0)
    stores_done = world.offload.drained().done_on(STORE)
    world.tier.on_result(a_result(load.ticket - 1, stores_done))
    world.step()
    assert (request.status, world.gpu_hit(request)) == (PARKED, 0)
    world.tier.on_result(a_result(load.ticket, stores_done))
    assert request.status == PARKED
    plan = world.step(request, body=world.flush_gpu)
    assert plan.waits_for(LOAD) == load.ticket
    assert request.status == RequestStatus.RUNNING
    ids = tuple(world.manager.get_block_ids(request.request_id)[0])
    assert ids[:4] == load.target_ids
    world.end(request)
    assert world.pool.get_num_free_blocks() == free


def test_beside_a_step_a_request_goes_on_as_soon_as_its_load_is_done(look_ups: LookUps) -> None:
    world = World(load_mode="parked")
    world.only_in_cpu(prompt(4))
    world.step(world.add(prompt(2, seed=7)))  # it runs
    request = world.add(prompt(4))
    free = world.pool.get_num_free_blocks()
    (load,) = world.step().before
    world.all_done()
    look_ups.take()
    plan = world.step(request, body=world.flush_gpu)
    assert plan.waits_for(LOAD) == load.ticket
    assert tuple(world.manager.get_block_ids(request.request_id)[0])[:4] == load.target_ids
    assert look_ups.take()[0] == [], "what its load has brought is known"
    assert not remembered(world)
    world.end(request)
    assert world.pool.get_num_free_blocks() == free


def parked_beside(
    num_running: int, *sizes: int, slowdown: float = 1.0
) -> tuple[World, list[Request], list[Any]]:
    """Requests whose prefixes of so many blocks are being loaded while others run."""
    world = World(num_blocks=65, load_mode="parked")
    for seed, size in enumerate(sizes):
        world.only_in_cpu(prompt(size, seed=seed))
    world.step(*(world.add(prompt(1, seed=70 + i)) for i in range(num_running)))
    world.tier.on_result(TransferResult(slowdown=slowdown))
    requests = [world.add(prompt(size, seed=seed)) for seed, size in enumerate(sizes)]
    loads = world.step().before
    assert [request.status for request in requests] == [PARKED] * len(sizes)
    return world, requests, list(loads)


def arrive(world: World, load: Any) -> None:
    world.tier.on_result(a_result(load.ticket, world.offload.drained().done_on(STORE)))


def parked(requests: list[Request]) -> list[bool]:
    return [request.status == PARKED for request in requests]


@pytest.mark.parametrize("num_running", [1, 6])
def test_a_request_joins_the_step_that_finds_its_load_done(num_running: int) -> None:
    world, requests, loads = parked_beside(num_running, 3, 3, 3)
    for count, load in enumerate(loads, 1):
        arrive(world, load)
        world.step()
        assert parked(requests) == [False] * count + [True] * (3 - count)


@pytest.mark.parametrize(
    ("step_ms", "stall_ms", "in_flight", "mode", "overlap", "joins"),
    [
        (2, 0, 1, "auto", 0, [False, False]),  # 3 blocks take 3 ms, and 6 of them 6 ms
        (4, 0, 1, "auto", 0, [True, False]),
        (7, 0, 1, "auto", 0, [True, True]),
        (2, 1, 1, "auto", 0, [False, False]),  # two others would wait for 1 ms each
        (2, 3, 1, "auto", 0, [True, False]),
        (2, 9, 1, "auto", 0, [True, True]),
        (7, 9, 0, "auto", 0, [False, False]),  # the device waits for the step
        (7, 9, 1, "parked", 0, [False, False]),  # none is promised before it is done
        (2, 0, 1, "auto", 0.75, [True, False]),  # 1.5 ms of each are behind the first layers
        (4, 0, 1, "auto", 0.75, [True, True]),
        (7, 9, 0, "auto", 0.75, [False, False]),
    ],
)
def test_what_crosses_before_the_step_can_begin_or_soon_after_counts_as_done(
    step_ms: float, stall_ms: float, in_flight: int, mode: str, overlap: float, joins: list[bool]
) -> None:
    world, requests, loads = parked_beside(1, 3, 3)
    world.tier.change(replace(world.tier.settings, load_mode=mode, max_stall_ms=stall_ms))
    world.tier.pace.in_flight = in_flight
    world.tier.pace._overlap = overlap
    world.tier.on_result(TransferResult(by_layer=True))
    world.tier.pace._steps = (step_ms, step_ms)
    world.tier.pace._began = 1000 * world.time - step_ms
    world.tier.before_schedule()
    assert parked(requests) == [not joined for joined in joins]
    plan = world.offload.make_plan(lambda *_: False)
    promised = tuple((LOAD, load.ticket) for load, joined in zip(loads, joins) if joined)
    assert (() if plan is None else plan.promised) == promised
    assert plan is None or plan.waits_for(LOAD) == promised[-1][1]


@pytest.mark.parametrize(("slowdown", "joins"), [(1.0, True), (2.0, False), (0.5, True)])
def test_a_load_is_expected_to_take_what_loads_take_lately(slowdown: float, joins: bool) -> None:
    """3 blocks took 3 ms when the tier was opened, and the step under way takes 4 ms."""
    world, requests, _ = parked_beside(1, 3, slowdown=slowdown)
    world.tier.change(replace(world.tier.settings, load_mode="auto", max_stall_ms=0))
    world.tier.pace.in_flight = 1
    world.tier.pace._steps = (4.0, 4.0)
    world.tier.pace._began = 1000 * world.time - 4
    world.tier.before_schedule()
    assert parked(requests) == [not joins]


def test_a_request_whose_load_has_failed_is_looked_up_again() -> None:
    world, requests, loads = parked_beside(4, 4, 4)
    stores_done = world.offload.drained().done_on(STORE)
    failed = a_result(loads[0].ticket, stores_done, failed_loads=(loads[0].ticket,))
    world.tier.on_result(failed)
    world.step()
    assert parked(requests) == [False, True]


def test_one_whose_load_has_failed_is_looked_up_again(look_ups: LookUps) -> None:
    world = World(load_mode="parked")
    world.only_in_cpu(prompt(4))
    request = world.add(prompt(4))
    (load,) = world.step().before
    done = world.offload.drained()
    look_ups.take()
    world.tier.on_result(a_result(done.done_on(LOAD), done.done_on(STORE), (load.ticket,)))
    world.tier.before_schedule()
    assert look_ups.take()[0] == [request]
    assert (request.status, world.gpu_hit(request)) == (WAITING, 0)


@pytest.mark.parametrize("stored_meanwhile", [False, True])
def test_a_parked_one_is_looked_up_again_if_the_tier_has_got_more_of_it(
    stored_meanwhile: bool, look_ups: LookUps, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(load_mode="parked")
    world.only_in_cpu(prompt(2))
    request = world.add(prompt(4))
    world.step()
    look_ups.take()
    world.all_done()
    third = world.hash_keys(request)[2]
    monkeypatch.setattr(world.offload, "lookup", lambda key: stored_meanwhile and key == third)
    world.tier.before_schedule()
    assert look_ups.take()[0] == [request] * stored_meanwhile


def test_a_hit_on_the_gpu_is_kept_recent_and_stored_again_one_step_later() -> None:
    world = World(load_mode="parked", store="eager")
    first = world.add(prompt(3))
    world.step(first)
    world.all_done()
    for key in world.hash_keys(first)[1:]:
        world.offload.discard(key)  # the tier loses two of them
    touched: list[Any] = []
    touch = world.offload.touch
    world.offload.touch = lambda keys: touched.append(keys) or touch(keys)  # type: ignore[method-assign]
    second = world.add(prompt(3))
    now = world.step(second)
    assert store_of(now) is None
    plan = world.step()
    assert touched == [world.hash_keys(second)]
    assert store_of(plan) is not None and len(store_of(plan).source_ids) == 2


def test_a_hit_that_has_left_the_gpu_since_leaves_the_store_of_its_block_alone() -> None:
    world = World(num_blocks=1 + 4, store="eager")
    first = world.add(prompt(3))
    world.step(first)
    world.all_done()
    world.end(first)
    world.add(prompt(3))
    world.step()  # hits the GPU, and is not admitted
    world.all_done()
    for key in world.hash_keys(first):
        world.offload.discard(key)
    world.flush_gpu()
    other = make_request(prompt(3, seed=5))
    world.admit(other)  # cached between steps, as asynchronous scheduling does
    store = store_of(world.step())
    keys = [world.pool.blocks[block_id].block_hash for block_id in store.source_ids]
    assert keys == world.hash_keys(other)


def test_a_block_is_not_stored_under_a_key_that_it_has_lost() -> None:
    world = World(num_blocks=1 + 4, store="eager")
    first = world.add(prompt(3))
    world.step(first)
    world.all_done()
    world.end(first)
    keys = world.hash_keys(first)
    block_of = {block.block_hash: block.block_id for block in world.pool.blocks}
    blocks = [block_of[key] for key in keys]
    world.flush_gpu()
    world.step()
    for key in keys:
        world.offload.discard(key)
    world.tier._recency.used.append((blocks, keys))  # hits that were noted before
    world.tier._recency.refresh()
    assert len(world.offload._queue) == 0
    for key, block in zip(keys, blocks):
        world.offload.queue_store(key, block)
    assert store_of(world.step()) is None
    assert world.offload.stats.overwritten == 3


def test_a_second_request_for_a_prefix_waits_for_the_first_ones_load() -> None:
    world = World(load_mode="parked")
    world.only_in_cpu(prompt(4))
    first, second = world.add(prompt(4)), world.add(prompt(4))
    free = world.pool.get_num_free_blocks()
    plan = world.step()
    assert len(plan.before) == 1
    assert [first.status, second.status] == [PARKED, PARKED]
    third = world.add(prompt(4))
    assert world.step() is None
    assert third.status == PARKED
    world.all_done()
    world.tier.before_schedule()
    assert [r.status for r in (first, second, third)] == [WAITING] * 3
    assert world.gpu_hit(third) == 4 * BLOCK
    world.step()
    assert world.pool.get_num_free_blocks() == free


def test_a_hit_without_room_beside_a_parked_load_waits() -> None:
    world = World(num_blocks=1 + 12, load_mode="parked")
    for seed in (1, 2):
        world.only_in_cpu(prompt(4, seed=seed))
    first, second = world.add(prompt(4, seed=1)), world.add(prompt(4, seed=1))
    third = world.add(prompt(4, seed=2))
    free = world.pool.get_num_free_blocks()
    plan = world.step()
    assert [r.status for r in (first, second, third)] == [PARKED, PARKED, WAITING]
    assert world.admissible == 0
    assert len(plan.before) == 1
    assert world.pool.get_num_free_blocks() == free - 4, "nothing is held for the third"
    world.all_done()
    world.step(first, second)
    assert world.admissible == 2
    assert list(world.scheduler.waiting) == [third]


def test_parked_requests_come_back_in_order() -> None:
    world = World(num_blocks=65, load_mode="parked")
    for seed in (1, 2):
        world.only_in_cpu(prompt(4, seed=seed))
    parked = [world.add(prompt(4, seed=seed)) for seed in (1, 1, 2)]
    other = world.add(prompt(4, seed=9))
    world.step()
    world.scheduler.waiting.remove_requests(parked)  # as vLLM does from 0.31 on
    world.scheduler.holding.prepend_requests(reversed(parked))
    world.all_done()
    world.tier.before_schedule()
    assert list(world.scheduler.waiting) == [*parked, other]
    assert not world.scheduler.holding


def test_a_request_without_a_hit_passes_a_parked_one() -> None:
    world = World(load_mode="parked")
    world.only_in_cpu(prompt(4))
    parked, other = world.add(prompt(4)), world.add(prompt(4, seed=5))
    world.step(other)
    assert (parked.status, other.status) == (PARKED, RequestStatus.RUNNING)


def test_a_preempted_request_gets_that_status_back() -> None:
    world = World(load_mode="parked")
    world.only_in_cpu(prompt(4))
    request = world.add(prompt(4))
    request.status = RequestStatus.PREEMPTED
    world.step()
    assert request.status == PARKED
    world.all_done()
    world.tier.before_schedule()
    assert request.status == RequestStatus.PREEMPTED


@pytest.mark.parametrize(("running", "expected"), [(2, WAITING), (3, PARKED)])
def test_auto_parks_what_would_stall_the_batch_too_long(running: int, expected: Any) -> None:
    world = World(num_blocks=65, load_mode="auto")  # 1 ms a block, 20 ms at most
    world.only_in_cpu(prompt(8))
    world.step(*add_many(world, running))
    request = world.add(prompt(8))
    world.step()
    assert request.status == expected


# Stores


def test_what_a_step_computes_is_stored_once_it_is_done() -> None:
    world = World()
    request = world.add(prompt(3))
    store = store_of(world.step(request))
    assert isinstance(store, Transfer)
    assert list(store.source_ids) == world.manager.get_block_ids(request.request_id)[0][:3]
    assert not any(world.offload.lookup(key) for key in world.hash_keys(request))
    world.tier.on_result(a_result(0, store.ticket))
    assert all(world.offload.lookup(key) for key in world.hash_keys(request))


def test_what_is_stored_already_is_not_stored_again() -> None:
    world = World()
    first, second = world.add(prompt(3)), world.add(prompt(3))
    assert store_of(world.step(first))
    assert world.step(second) is None


def test_what_a_request_that_does_not_run_has_cached_is_not_stored() -> None:
    world = World(num_blocks=65)
    preempted, other = add_many(world, 2)
    store = store_of(world.step(other, body=lambda: world.admit(preempted)))
    assert list(store.source_ids) == world.manager.get_block_ids(other.request_id)[0][:4]
    assert not any(world.offload.holds(key) for key in world.hash_keys(preempted))


def test_a_block_that_is_handed_out_again_is_not_stored() -> None:
    world = World(num_blocks=1 + 5)
    request = world.add(prompt(4))

    def preempt_and_reuse_three() -> None:
        world.admit(request)
        world.end(request)
        world.pool.get_new_blocks(3)

    world.tier.before_schedule()
    preempt_and_reuse_three()
    # It is named as scheduled, so that only the fate of its blocks is left to decide by.
    output = step_output({request.request_id: request.num_tokens})
    world.tier.after_schedule(output)
    kept = store_of(getattr(output, PLAN)).source_ids
    assert len(kept) == 2, "the block that was not full, and two full ones, are gone"
    assert all(world.pool.blocks[b].block_hash in world.hash_keys(request) for b in kept)


def test_a_block_cached_between_steps_is_stored_unless_handed_out() -> None:
    """Asynchronous scheduling caches blocks when a step's output arrives."""
    world = World()
    kept, lost = (world.add(prompt(2, seed=s)) for s in (1, 2))
    for request in (kept, lost):
        world.admit(request)
    world.end(lost)
    world.flush_gpu()
    store = store_of(world.step())
    assert list(store.source_ids) == world.manager.get_block_ids(kept.request_id)[0][:2]


def test_reuse_of_a_block_waits_for_its_store() -> None:
    world = World(num_blocks=1 + 5)
    request = world.add(prompt(4))
    store = store_of(world.step(request))
    world.end(request)
    other = world.add(prompt(4, seed=9))
    plan = world.step(other)
    assert plan.waits_for(STORE) == store.ticket


# Reset and finish


@pytest.mark.parametrize("holding", ["skipped_waiting", "kv_holding_waiting"])
def test_reset_gives_everything_up(holding: str) -> None:
    world = World(num_blocks=1 + 12, load_mode="parked", holding=holding)
    for seed in (1, 2):
        world.only_in_cpu(prompt(4, seed=seed))
    requests = [world.add(prompt(4, seed=seed)) for seed in (1, 1, 2)]
    free = world.pool.get_num_free_blocks()
    world.step()
    assert [r.status for r in requests] == [PARKED, PARKED, WAITING]
    assert world.admissible == 0
    world.tier.reset()
    assert world.ranks.calls == ["drain"]
    assert [r.status for r in requests] == [WAITING] * 3
    assert world.pool.get_num_free_blocks() == free
    assert not any(world.offload.holds(k) for r in requests for k in world.hash_keys(r))
    assert world.offload.num_used == 0
    assert world.pool.reset_prefix_cache()
    plan = world.step()
    assert plan is not None and not (plan.before or plan.after or plan.promised)
    assert plan.waits_for(LOAD) == 1, "where calls come beside steps, a rank may begin it yet"
    assert [r.status for r in requests] == [WAITING] * 3
    assert world.admissible == 3, "none has anything to load any more, so vLLM decides"


def test_reset_with_nothing_under_way_needs_no_rank() -> None:
    world = World()
    world.only_in_cpu(prompt(4))
    world.tier.reset()
    assert world.ranks.calls == []
    request = world.add(prompt(4))
    assert world.step() is None
    assert world.gpu_hit(request) == 0


@pytest.mark.parametrize("by_name", [True, False])
def test_a_parked_request_can_finish(by_name: bool) -> None:
    world = World(load_mode="parked")
    world.only_in_cpu(prompt(4))
    gone, stays = world.add(prompt(4)), world.add(prompt(4))
    free = world.pool.get_num_free_blocks()
    world.step()
    world.tier.on_finish([gone.request_id] if by_name else None)
    assert gone.status == WAITING
    assert stays.status == (PARKED if by_name else WAITING)
    world.scheduler.waiting.remove_request(gone)
    gone.status = RequestStatus.FINISHED_ABORTED
    world.all_done()
    world.step()
    assert gone.status == RequestStatus.FINISHED_ABORTED
    assert stays.status == WAITING
    assert gone.request_id not in world.tier._hits._looked_up
    assert world.gpu_hit(stays) == 4 * BLOCK, "the load went on"
    assert world.pool.get_num_free_blocks() == free


def test_a_parked_request_that_vllm_has_moved_leaves_the_queue_of_holders() -> None:
    world = World(load_mode="parked")
    world.only_in_cpu(prompt(4))
    request = world.add(prompt(4))
    world.step()
    world.scheduler.waiting.remove_request(request)
    world.scheduler.holding.add_request(request)
    world.tier.on_finish([request.request_id])
    assert (list(world.scheduler.waiting), list(world.scheduler.holding)) == ([request], [])


def test_a_request_that_waits_for_room_can_finish() -> None:
    world = World(num_blocks=1 + 9, load_mode="parked")
    for seed in (1, 2):
        world.only_in_cpu(prompt(4, seed=seed))
    parked, waits = world.add(prompt(4, seed=1)), world.add(prompt(4, seed=2))
    small = world.add(prompt(1, seed=9))
    free = world.pool.get_num_free_blocks()
    world.step()
    assert [parked.status, waits.status] == [PARKED, WAITING]
    assert world.admissible == 0
    world.tier.on_finish([waits.request_id])
    assert [parked.status, waits.status] == [PARKED, WAITING]
    world.scheduler.waiting.remove_request(waits)
    world.step()
    assert world.admissible is None, "nobody is in the way of the small one"
    world.tier.reset()
    assert parked.status == WAITING and small.status == WAITING
    assert world.pool.get_num_free_blocks() == free


@pytest.mark.parametrize("waits_for", ["its load", "room"])
def test_what_is_kept_of_a_request_goes_with_the_output_that_says_it_has_ended(
    waits_for: str,
) -> None:
    """One that was preempted can end by the output of a step that began before."""
    world = World(num_blocks=17, load_mode="parked")
    world.only_in_cpu(prompt(4))
    if waits_for == "room":
        world.step(world.add(prompt(13, seed=7)))
    request = world.add(prompt(4))
    world.step()
    assert parked([request]) == [waits_for == "its load"]
    assert world.tier._loads.num_parked + len(remembered(world)) == 1
    output = step_output({})
    output.finished_req_ids = {request.request_id}
    world.scheduler.waiting.remove_request(request)
    step_hooks.schedule(lambda: output, world.hooks.live, world.breaker)()
    assert not (world.tier._loads.num_parked or remembered(world) or world.tier._hits._looked_up)


def test_an_unknown_request_can_finish() -> None:
    world = World()
    (request,) = add_many(world, 1)
    world.step()
    world.tier.on_finish(["unknown"])
    assert set(world.tier._lookups._results) == {request.request_id}
    world.tier.on_finish([request.request_id])
    assert not remembered(world)
    assert not world.tier._hits._looked_up


def test_closing_closes_the_ranks() -> None:
    world = World()
    world.tier.close()
    assert world.ranks.calls == ["close"]


# Beside a drafting model, of several KV cache groups


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_what_vllm_finds_and_leaves_out_need_not_be_on_the_gpu(load_mode: str) -> None:
    """By itself it would leave out the block before, at whose end there is no state."""
    drafter = Drafter(2, seed=1, reads_layers=True, always=False)
    mini = Mini(windows=(None, STATE), blocks=60, drafter=drafter, load_mode=load_mode)
    asked = mini_prompt(6, seed=3)
    plain = Mini(windows=(None, STATE), blocks=60, drafter=drafter, tier=False)
    for _ in range(2):
        plain.add(asked)
        plain.run()
    mini.only_in_cpu(asked)
    name = mini.add(asked)
    mini.add(mini_prompt(2, seed=4))  # beside it a load in its own time pays
    mini.run()
    mini.check()
    assert mini.hits[name] == plain.hits["request-1"] == 5 * MINI_BLOCK
    assert mini.manager.stats.loaded == 5 + 1
    assert mini.view.blocks_for(1) == plain_blocks(1) + 2, "a block for each draft's state"


def drafted(windows: Any, tier: bool) -> Mini:
    return Mini(windows=windows, blocks=120, tier=tier, drafter=Drafter(2, 1, True, False))


@pytest.mark.parametrize("windows", [(None,), (None, 40)])
def test_what_another_request_of_the_step_computes_is_hit_beside_drafts(windows: Any) -> None:
    hits = []
    for mini in (drafted(windows, True), drafted(windows, False)):
        mini.add(mini_prompt(5, seed=1), count=1)
        mini.run()
        whole = [*mini_prompt(5, seed=1), *mini_prompt(4, seed=2)]
        for _ in range(3):
            mini.add(whole, count=1)
        mini.run()
        mini.check()
        hits.append(mini.hits)
    assert hits[0] == hits[1] and len(set(hits[0].values())) == 3


def test_a_prefix_that_only_some_groups_have_ends_at_a_kept_window() -> None:
    """From 0.26 on vLLM keeps the window at its end, where it keeps few, for the next one."""
    hits = []
    for tier in (True, False):
        mini = Mini(windows=(None, 40), blocks=120, tier=tier, retention=0)
        for seed in (2, 3, 4):  # they part behind six blocks
            mini.add([*mini_prompt(6, seed=1, tail=0), *mini_prompt(3, seed=seed)], count=1)
            mini.run()
            mini.settle()
            if tier:
                mini.pool.free_blocks(mini.pool.get_new_blocks(mini.pool.get_num_free_blocks()))
        mini.check()
        hits.append(list(mini.hits.values()))
    assert hits[0] == hits[1] and hits[0][2] == 6 * MINI_BLOCK


def plain_blocks(tokens: int) -> int:
    """Blocks that a request of so many tokens is counted with where nothing is drafted."""
    return Mini(windows=(None, STATE), blocks=60).view.blocks_for(tokens)


def test_a_block_that_vllm_asks_for_twice_needs_room_once() -> None:
    """As with several KV cache groups, which it asks in turn until they agree."""
    mini = Mini(windows=(None, 48, 64), blocks=80)
    mini.only_in_cpu(mini_prompt(6, seed=1, tail=1))
    request = mini.scheduler.requests[mini.add(mini_prompt(6, seed=1, tail=1))]
    mini.manager.discard(mini.view.key(request.block_hashes[-1], 1))
    pool = mini.tier._admission._pool
    found = pool.look_up(request, 80)
    assert found.tokens == 5 * MINI_BLOCK
    last = mini.view.key(request.block_hashes[-1], 0)  # is asked for before the others disagree
    enough = pool.look_up(request, len({*found.keys, last}))
    assert enough.keys == found.keys and not enough.cut_short
