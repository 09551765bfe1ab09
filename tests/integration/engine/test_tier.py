"""What loads inline, what is parked, what waits for room, and what a plan says of it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import FakeRanks, Mini
from integration.engine.world import BLOCK, World, prompt
from scheduler_half.scenarios import prompt as long_prompt
from tier.plans import a_result, store_of
from vllm.v1.request import Request, RequestStatus

from kvoffload_patch.integration.engine.requests import admission
from kvoffload_patch.integration.errors import PromiseBroken
from kvoffload_patch.integration.protocol import RESULT
from kvoffload_patch.links import LOAD, STORE
from kvoffload_patch.tier.tuning import TOGETHER_BLOCKS, TOGETHER_STEPS

PARKED = RequestStatus.WAITING_FOR_REMOTE_KVS
WAITING = RequestStatus.WAITING


def hits(world: World, count: int, blocks: int, first_seed: int = 1) -> list[Request]:
    """Requests that wait, each with a prompt of its own that only the tier has."""
    seeds = range(first_seed, first_seed + count)
    for seed in seeds:
        world.only_in_cpu(prompt(blocks, seed=seed))
    return [world.add(prompt(blocks, seed=seed)) for seed in seeds]


def statuses(requests: list[Request]) -> list[Any]:
    return [request.status for request in requests]


def test_of_many_large_hits_the_first_loads_inline_and_the_others_beside_it() -> None:
    world = World(num_blocks=129, load_mode="auto")  # 1 ms a block, 20 ms at most
    requests = hits(world, 4, blocks=21)
    plan = world.step(requests[0])
    assert len(plan.before) == 4
    assert plan.waits_for(LOAD) == plan.before[0].ticket, "the step waits for what it reads only"
    assert statuses(requests) == [RequestStatus.RUNNING, *[PARKED] * 3]


def test_small_hits_load_inline_together() -> None:
    world = World(num_blocks=129, load_mode="auto")
    requests = hits(world, 3, blocks=3)
    world.tier.before_schedule()
    assert statuses(requests) == [WAITING] * 3  # 0 + (3 + 3) + (6 + 6) ms


def test_an_inline_load_counts_the_parked_ones_before_it() -> None:
    world = World(num_blocks=129, load_mode="auto")
    requests = hits(world, 2, blocks=21)
    world.step(requests[0])
    world.end(requests[0])
    world.scheduler.waiting.remove_request(requests[1])
    assert world.tier._loads.blocks_under_way == 21
    small = hit_behind(world)
    assert small.status == PARKED, "it would wait for the 21 blocks before it"


def hit_behind(world: World) -> Request:
    """A hit of one block, beside a load that does not end."""
    other = world.add(prompt(1, seed=50))
    plan = world.step(other)
    world.tier.on_result(_done(1, store_of(plan).ticket))
    world.end(other)
    world.flush_gpu()
    small = world.add(prompt(1, seed=50))
    world.step()
    return small


def test_a_parked_request_takes_none_of_the_steps_tokens() -> None:
    world = World(num_blocks=129, load_mode="parked", max_tokens=3)
    requests = hits(world, 20, blocks=3)
    world.step()
    assert statuses(requests) == [PARKED] * 20, "more than the tokens and the look-ahead allow"


def test_loads_behind_the_last_token_are_begun_and_never_inline() -> None:
    world = World(num_blocks=257, load_mode="auto", max_tokens=4 * BLOCK + 1)
    hit_seeds = list(range(1, 31))
    for seed in hit_seeds:
        world.only_in_cpu(prompt(2, seed=seed))
    cold = world.add(prompt(4, seed=99))
    waiting = [world.add(prompt(2, seed=seed)) for seed in hit_seeds]
    plan = world.step(cold)
    assert len(plan.before) == 16, "so many requests ahead, and no more"
    assert statuses(waiting) == [PARKED] * 16 + [WAITING] * 14
    assert plan.waits_for(LOAD) == 0


def test_parked_requests_count_as_running_ones() -> None:
    world = World(num_blocks=129, load_mode="parked", max_running=3)
    requests = hits(world, 5, blocks=3)
    assert len(world.step().before) == 3
    assert world.admissible == 0
    assert world.step() is None
    world.all_done()
    world.step(requests[0])
    assert statuses(requests[1:]) == [WAITING] * 4
    assert world.step() is None, "two of the three slots are theirs"
    world.end(requests[0])
    assert len(world.step().before) == 1
    assert statuses(requests[1:]) == [WAITING, WAITING, PARKED, WAITING]
    assert world.admissible == 2


def test_one_without_room_goes_on_as_soon_as_it_has_some() -> None:
    world = World(num_blocks=1 + 17, load_mode="parked")
    requests = hits(world, 4, blocks=4)  # 5 blocks each: three fit
    first = world.step()
    assert len(first.before) == 3 and requests[3].status == WAITING
    assert world.admissible == 0
    stores = world.offload.drained().done_on(STORE)
    world.tier.on_result(_done(first.before[0].ticket, stores))
    world.step(requests[0])
    assert world.admissible == 1
    assert world.step() is None, "no room yet"
    assert world.admissible == 0
    world.end(requests[0])
    plan = world.step()
    assert plan is not None and len(plan.before) == 1, "two loads are still under way"
    assert requests[3].status == PARKED
    assert world.admissible is None, "nobody waits for room"


def test_nothing_passes_one_that_waits_for_room() -> None:
    world = World(num_blocks=1 + 12, load_mode="parked")
    for seed, blocks in ((1, 6), (2, 8), (3, 1)):
        world.only_in_cpu(prompt(blocks, seed=seed))
    large = [world.add(prompt(6, seed=1)), world.add(prompt(8, seed=2))]
    small = world.add(prompt(1, seed=3))
    assert len(world.step().before) == 1
    assert statuses([*large, small]) == [PARKED, WAITING, WAITING]
    assert world.admissible == 0
    world.all_done()
    world.step(large[0])
    assert world.admissible == 1
    world.step()
    assert statuses([large[1], small]) == [WAITING] * 2
    assert world.admissible == 0
    world.end(large[0])
    assert len(world.step().before) == 2
    assert statuses([large[1], small]) == [PARKED] * 2


def test_what_a_step_computes_in_new_blocks_is_stored_while_others_are_not_trusted() -> None:
    world = World()
    running, request = world.add(prompt(1, seed=1)), world.add(prompt(3))
    world.step(running)
    (block,) = [block for block in world.pool.blocks if block.block_hash is not None]
    world.tier._invalid.untrusted[block.block_id] = block.block_hash
    assert len(store_of(world.step(request)).source_ids) == 3
    assert world.tier._invalid.untrusted and block.ref_cnt


def test_of_what_becomes_free_within_a_step_only_what_is_trusted_is_stored() -> None:
    """As with a preemption, after which the GPU may lose the blocks in the next step."""
    world = World(store="lazy")
    right, wrong = world.add(prompt(2, seed=1)), world.add(prompt(2, seed=2))
    world.step(right, wrong)
    for key in world.hash_keys(wrong):
        world.tier._invalid.untrusted[world.view.gpu_lookup()(key).block_id] = key
    world.step(body=lambda: [world.end(request) for request in (right, wrong)])
    assert all(map(world.offload.holds, world.hash_keys(right)))
    assert not any(map(world.offload.holds, world.hash_keys(wrong)))


def test_a_parked_load_that_failed_is_not_published() -> None:
    world = World(load_mode="parked")
    world.only_in_cpu(prompt(4))
    own, other = world.add(prompt(4)), world.add(prompt(4))
    free = world.pool.get_num_free_blocks()
    (load,) = world.step().before
    stores = world.offload.drained().done_on(STORE)
    world.tier.on_result(_done(load.ticket, stores, failed_loads=(load.ticket,)))
    world.tier.before_schedule()
    assert statuses([own, other]) == [WAITING] * 2
    assert world.gpu_hit(own) == 0
    plan = world.step()
    assert plan.waits_for(LOAD) == load.ticket, "another rank may still write to its blocks"
    assert plan.promised == ()
    assert world.pool.get_num_free_blocks() == free
    assert not any(world.offload.holds(key) for key in world.hash_keys(own))
    assert store_of(world.step(own)) is not None, "it is computed and stored again"


def _done(loads: int, stores: int, **more: Any) -> Any:
    return a_result(loads, stores, **more)


def test_slots_that_the_ranks_have_by_now_are_used() -> None:
    world = World(num_slots=8)
    world.only_in_cpu(prompt(7))
    world.tier.on_result(world.offload.drained()._replace(num_slots=20, growing=True))
    assert world.offload.num_slots == 20


def test_an_output_without_what_is_done_ends_the_engine() -> None:
    """Parked requests would wait for ever, in steps without tokens."""
    mini = Mini(load_mode="parked", ranks=FakeRanks())
    mini.only_in_cpu(long_prompt(6, seed=1))
    mini.add(long_prompt(6, seed=1), count=3)
    mini.begin_step()
    delattr(mini.queue[-1][1], RESULT)
    with pytest.raises(PromiseBroken) as raised:
        mini.end_step()
    assert str(raised.value) == (
        "kvoffload_patch: expected what is done of the CPU tier's copies on the output of each "
        "step, found a ModelRunnerOutput without it, so requests would wait for their loads for "
        "ever; set KVOFFLOAD_DISABLE=1 to serve without the CPU tier, and report it with the "
        "executor and the model runner in use."
    )


def test_no_token_leaves_of_a_step_that_has_failed_on_another_rank() -> None:
    mini = Mini(load_mode="inline")
    mini.only_in_cpu(long_prompt(6, seed=1))
    name = mini.add(long_prompt(6, seed=1), count=3)
    mini.begin_step()
    mini.ranks.step_failure = lambda: "rank 1 could not do it"
    with pytest.raises(PromiseBroken, match="^rank 1 could not do it$"):
        mini.end_step()
    assert mini.scheduler.requests[name].num_output_tokens == 0


def test_results_that_come_late_or_twice_say_nothing_new() -> None:
    mini = Mini(load_mode="parked", late=0, ranks=FakeRanks())
    mini.only_in_cpu(long_prompt(6, seed=1))
    before = mini.manager.drained()
    name = mini.add(long_prompt(6, seed=1), count=3)
    mini.begin_step()
    mini.end_step()
    mini.begin_step()
    now = getattr(mini.queue[-1][1], RESULT)
    mini.end_step()
    for said in (before, now, before):
        mini.tier.on_result(said)
    assert mini.manager.drained().done == now.done
    mini.run(steps=50)
    mini.check()
    assert mini.hits[name] == 6 * 16


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_the_tier_is_told_all_keys_of_a_request_that_has_ended_head_first(
    load_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mini = Mini(load_mode=load_mode, limits={"max_num_batched_tokens": 64})  # prompts take steps
    told: list[list[Any]] = []
    monkeypatch.setattr(mini.manager, "request_ended", lambda keys, *_: told.append(keys))
    mini.add(long_prompt(6, seed=1), count=20)
    mini.run()
    mini.step()
    (first,) = told
    assert len(first) == len(set(first)) == 6 + 1, "its answer has filled a block"
    assert all(map(mini.manager.holds, first))
    mini.only_in_cpu(long_prompt(3, seed=2))
    told.clear()
    mini.add(long_prompt(6, seed=1, tail=0) + long_prompt(1, seed=4), count=1)
    mini.add(long_prompt(5, seed=1)[:40] + long_prompt(4, seed=3), count=1)
    mini.run()
    mini.step()
    assert sorted(told, key=len)[-1][:2] == first[:2]
    assert first[:6] in [keys[:6] for keys in told], "what it found, and computed behind that"


def test_of_a_preempted_request_that_is_not_looked_up_again_each_key_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mini = Mini()
    told: list[list[Any]] = []
    monkeypatch.setattr(mini.manager, "request_ended", lambda keys, *_: told.append(keys))
    mini.add(long_prompt(6, seed=1), count=20)
    mini.step()
    mini.scheduler._preempt_request(mini.scheduler.running.pop(), 0.0)
    monkeypatch.setattr(admission, "SCAN_MARGIN_REQUESTS", -100)  # so many wait before it
    mini.pool.reset_prefix_cache()
    mini.run()
    mini.step()
    mini.check()
    (keys,) = told
    assert len(keys) == 6 + 1 and len(set(keys)) == 6 + 1


def test_keys_of_requests_that_run_are_forgotten_with_a_reset_and_an_abort() -> None:
    mini = Mini()
    names = [mini.add(long_prompt(6, seed=seed), count=50) for seed in (1, 2)]
    mini.step()
    mini.step()
    assert set(mini.tier._recency.keys) == set(names)
    mini.abort(names[0])
    mini.step()
    assert set(mini.tier._recency.keys) == {names[1]}
    assert not mini.scheduler.reset_prefix_cache(), "a request runs"
    assert set(mini.tier._recency.keys) == {names[1]}
    mini.tier.reset()
    mini.tier.gpu_emptied()
    assert not mini.tier._recency.keys
    mini.run()
    mini.check()


def test_blocks_that_decodes_fill_are_stored_by_one_plan_for_several_steps() -> None:
    mini = Mini(blocks=101)
    for seed in range(6):
        mini.add(prompt(1, seed=seed, tail=seed), count=60)
    steps = 0
    while mini.scheduler.has_requests():
        mini.step()
        steps += 1
        waiting = len(mini.manager._queue)
        assert waiting < TOGETHER_BLOCKS
    cached = [block for block in mini.pool.blocks if block.block_hash is not None]
    stored = [len(one.source_ids) for one in map(store_of, mini.plans) if one is not None]
    assert sum(stored) == len(cached) > 20
    assert len(stored) <= steps / TOGETHER_STEPS + 2
    assert not mini.manager._queue, "the step after the last request's end leaves none behind"
    mini.check()


def test_a_load_that_a_rank_begins_after_a_reset_is_waited_for() -> None:
    """Where calls come beside steps, a rank has drained before it has carried out the load."""
    mini = Mini(load_mode="parked", late=6, blocks=14)
    mini.only_in_cpu(prompt(6, seed=1))
    name = mini.add(prompt(6, seed=1))
    mini.step()
    mini.abort(name)
    mini.ranks.drain = lambda: True  # type: ignore[method-assign]
    assert mini.scheduler.reset_prefix_cache()
    for seed in (2, 3):
        mini.add(prompt(4, seed=seed), count=12)
    mini.run()
    mini.check()
