"""The front of vLLM's queue of free blocks: what the tier is told of it, and when."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import SLOT_BYTES, Mini
from integration.engine.world import World, make_request, prompt
from scheduler_half.scenarios import prompt as long_prompt
from tier.plans import store_of

from kvoffload_patch.config import GIB
from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView
from kvoffload_patch.integration.engine.blocks.free_front import FreeFront


class Told:
    """Stands for the tier: what it is told of."""

    lazy = True

    def __init__(self) -> None:
        self.blocks: list[tuple[int, Any]] = []

    def about_to_lose(self, gpu_block_ids: list[int], keys: list[Any]) -> int:
        return len(self.leaving(gpu_block_ids, keys))

    def leaving(self, gpu_block_ids: list[int], keys: list[Any]) -> dict[Any, int]:
        self.blocks += zip(gpu_block_ids, keys)
        return dict(zip(keys, gpu_block_ids))

    def take(self) -> list[int]:
        taken, self.blocks = self.blocks, []
        return [block for block, _ in taken]


def front_of(world: World, ahead: int) -> tuple[FreeFront, Told]:
    told = Told()
    front = FreeFront(SchedulerView(world.scheduler), told)  # type: ignore[arg-type]
    front._ahead, front._step_blocks = ahead, 0
    return front, told


def free_ids(world: World) -> list[int]:
    return [block.block_id for block in world.pool.free_block_queue.get_all_free_blocks()]


def ended(world: World, blocks: int, seed: int) -> None:
    request = world.add(prompt(blocks, seed=seed))
    world.step(request)
    world.end(request)


@pytest.mark.parametrize("store", ["eager", "auto"])
def test_while_the_tier_grows_what_the_gpu_is_about_to_lose_evicts(store: str) -> None:
    world = World(num_blocks=1 + 12, num_slots=4, store=store, growing=True)
    assert world.tier._front is not None
    world.tier._front._ahead = 8
    first, second, third = (
        world.hash_keys(make_request(prompt(4, seed=seed))) for seed in (1, 2, 3)
    )

    def held(keys: list[Any]) -> int:
        return sum(map(world.offload.holds, keys))

    ended(world, 4, seed=1)
    ended(world, 4, seed=2)
    assert (held(first), held(second)) == (4, 0), "nothing is evicted while the GPU has it"
    world.tier.on_result(world.offload.drained())
    ended(world, 4, seed=3)
    assert (held(first), held(second), held(third)) == (0, 4, 0)
    world.tier.on_result(world.offload.drained()._replace(num_slots=8, growing=True))
    world.step()
    assert held(second) == 4 and (held(third) == 4 or store == "auto")
    assert (world.offload.stats.overwritten, world.offload.stats.evicted) == (0, 4)


def test_a_tier_that_grows_by_a_command_evicts_for_what_the_gpu_is_about_to_lose() -> None:
    """As one that grows from the start: the command comes when all slots are there."""
    world = World(num_blocks=1 + 12, num_slots=4, store="eager")
    world.tier._ranks.resize = lambda num_slots, sizing: (4, True)  # type: ignore[method-assign]
    world.tier.resize(8)
    assert world.offload.growing
    for seed in range(1, 6):
        ended(world, 4, seed)
        world.tier.on_result(world.offload.drained())
    assert world.offload.stats.evicted and not world.offload.stats.overwritten


def test_a_tier_of_full_size_that_stores_eagerly_is_told_nothing() -> None:
    assert not World(store="eager").offload.looks_ahead
    grown = World(num_slots=4, store="eager", growing=True)
    ended(grown, 6, seed=1)
    assert grown.offload.looks_ahead, "two blocks wait"
    grown.tier.on_result(grown.offload.drained()._replace(num_slots=8, growing=False))
    assert not grown.offload.looks_ahead


def test_a_load_waits_for_no_stores_while_the_tier_holds_what_the_gpu_holds() -> None:
    world = World(num_blocks=17)
    front, told = front_of(world, ahead=2)
    ended(world, 8, seed=1)
    told.lazy = False
    assert front.may_overwrite("a", 12) and told.take() == []
    told.lazy = True
    assert not front.may_overwrite("a", 12)


def test_only_blocks_that_hold_something_are_told_and_each_once() -> None:
    world = World(num_blocks=17)
    front, told = front_of(world, ahead=12)
    ended(world, 3, seed=1)
    front.look()
    assert told.take() == [], "the first 12 are empty"
    ended(world, 3, seed=2)
    front, told = front_of(world, ahead=16)
    front.look()
    assert len(told.take()) == 6
    front.look()
    assert told.take() == []


def test_the_tier_is_told_in_the_order_in_which_blocks_are_handed_out() -> None:
    world = World(num_blocks=9)
    ended(world, 3, seed=1)
    ended(world, 3, seed=2)
    front, told = front_of(world, ahead=8)
    front.look()
    keys = [world.pool.blocks[block].block_hash for block in free_ids(world)]
    assert told.take() == [b for b, key in zip(free_ids(world), keys) if key is not None]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_in_front_has_been_told_whatever_comes_and_goes(seed: int) -> None:
    rng, world = random.Random(seed), World(num_blocks=40)
    ahead = rng.choice([3, 8, 16])
    front, told = front_of(world, ahead)
    known: set[int] = set()
    running: list[list[Any]] = []
    for number in range(400):
        free = world.pool.get_num_free_blocks()
        if rng.random() < 0.5 and free:
            blocks = world.pool.get_new_blocks(rng.randint(1, min(free, 6)))
            for block in blocks:
                block.set_block_hash(f"key-{number}-{block.block_id}".encode(), 4)
            front.handed_out([block.block_id for block in blocks])
            known.difference_update(block.block_id for block in blocks)
            running.append(blocks)
        elif rng.random() < 0.3 and free:
            hit = [world.pool.blocks[rng.choice(free_ids(world))]]
            world.pool.touch(hit)
            front.hit([block.block_id for block in hit], [block.block_hash for block in hit])
            known.difference_update(block.block_id for block in hit)
            running.append(hit)
        elif running:
            world.pool.free_blocks(reversed(running.pop(rng.randrange(len(running)))))
        front.look()
        known.update(told.take())
        first = [world.pool.blocks[block] for block in free_ids(world)[:ahead]]
        assert {b.block_id for b in first if b.block_hash is not None} <= known
        assert len(front._told) <= ahead + 6


def test_the_front_is_told_while_one_that_stores_nothing_uses_what_was_looked_at_last() -> None:
    """Nobody tells of its hit; from a block that is in use no way leads on in vLLM's queue."""
    world = World(num_blocks=9)
    ended(world, 3, seed=1)
    ended(world, 3, seed=2)
    front, told = front_of(world, ahead=4)
    front.look()
    told.take()
    world.pool.touch([world.pool.blocks[free_ids(world)[3]]])
    front.handed_out([block.block_id for block in world.pool.get_new_blocks(2)])
    front.look()
    assert told.take() == free_ids(world)[1:3]


def test_what_is_free_before_a_block_that_the_tier_has_held_is_told() -> None:
    """As for a request that waits for room: its hit comes to the end of vLLM's queue each step."""
    mini = Mini(store="lazy", blocks=25)
    mini.tier._loads.is_next = lambda blocks, taken: True
    mini.add(hit := long_prompt(2, seed=1), count=1)
    mini.run()
    mini.add(long_prompt(12, seed=2, tail=1), count=9)
    ends = mini.add(long_prompt(4, seed=3), count=2)
    mini.step()
    waits = mini.add(hit + long_prompt(12, seed=4), count=1)
    while ends in mini.scheduler.requests:
        mini.step()
    mini.step()
    keys = [block.block_hash for block in mini.view.free_after(None, 25)]
    found = [mini.manager.holds(key) for key in keys if key is not None]
    assert waits not in mini.hits and len(found) == 6, "this test shows nothing"
    assert all(found)
    mini.run()
    mini.check()


def test_what_is_refused_is_not_told_until_it_was_handed_out() -> None:
    world = World(num_blocks=9)
    ended(world, 3, seed=1)
    front, told = front_of(world, ahead=8)
    first = [b for b in free_ids(world) if world.pool.blocks[b].block_hash is not None]
    front.refuse(first[:2])
    front.look()
    assert told.take() == first[2:]
    front.handed_out(free_ids(world))
    front.look()
    assert told.take() == first


def test_what_was_refused_is_told_once_it_is_hit_if_it_is_the_same_yet() -> None:
    world = World(num_blocks=9)
    ended(world, 3, seed=1)
    front, told = front_of(world, ahead=8)
    tail, *rest = (b for b in free_ids(world) if world.pool.blocks[b].block_hash is not None)
    front.refuse([tail, *rest])
    keys = [world.pool.blocks[block].block_hash for block in rest]
    front.hit([tail, *rest], [b"of before", *keys])
    front.look()
    assert told.take() == rest


def test_a_request_waits_once_for_what_its_load_would_overwrite() -> None:
    world = World(num_blocks=9)
    ended(world, 6, seed=1)
    front, told = front_of(world, ahead=2)
    assert not front.may_overwrite("a", 4)
    assert told.take()
    assert front.may_overwrite("a", 6)
    assert told.take() == []
    front.clear()
    assert not front.may_overwrite("b", 6)


def test_a_load_does_not_wait_for_what_was_stored_with_an_earlier_plan() -> None:
    world = World(num_blocks=17)
    ended(world, 8, seed=1)
    ended(world, 8, seed=2)
    front, told = front_of(world, ahead=6)
    assert front.look() and len(front._told) == 6
    told.take()
    front._step_blocks = 2
    assert front.may_overwrite("a", 4)
    assert told.take() == []
    front.handed_out(free_ids(world)[:2])
    assert not front.may_overwrite("b", 3), "one block more than is stored"
    assert len(told.take()) == 5, "as far as it is looked at when the request comes again"
    assert not front.may_overwrite("c", 3), "nothing was planned since"
    front.look()
    assert front.may_overwrite("c", 3)


def test_a_shared_prefix_in_use_is_stored_before_it_is_lost() -> None:
    mini = Mini(blocks=33, store="lazy")
    mini.tier._front._ahead = 12
    shared = long_prompt(6, seed=1)
    for seed in (2, 3):  # the second one hits it on the GPU
        mini.add(shared + long_prompt(2, seed=seed), count=2)
        mini.run()
    assert not mini.manager.stats.stored, "all of it is far from being overwritten"
    for seed in range(4, 12):
        mini.add(long_prompt(6, seed=seed), count=1)
        mini.run()
    again = mini.add(shared + long_prompt(1, seed=12), count=2)
    mini.run()
    mini.check()
    assert mini.hits[again] >= len(shared) - 1
    assert mini.manager.stats.loaded >= 6 and not mini.manager.stats.overwritten


def test_a_load_waits_a_step_for_stores_while_others_run_and_loses_nothing() -> None:
    mini = Mini(blocks=49, load_mode="parked", store="auto", weighs=False)
    old = long_prompt(14, seed=1)
    mini.only_in_cpu(old)
    mini.manager._stores_ahead = False
    mini.tier._front._ahead = 0
    runs = mini.add(long_prompt(1, seed=2), count=40)
    for seed in (3, 4, 5):
        mini.add(long_prompt(14, seed=seed), count=1)
    while len(mini.scheduler.running) + len(mini.scheduler.waiting) > 1:
        mini.step()
    lost = mini.manager.stats.overwritten
    again = mini.add(old, count=1)
    mini.begin_step()
    assert store_of(mini.plans[-1]) is not None and not mini.plans[-1].before
    mini.end_step()
    mini.run()
    mini.check()
    assert mini.hits[again] and mini.manager.stats.overwritten == lost
    assert mini.answers[runs]


def full_of_what_is_not_stored() -> tuple[Mini, list[list[int]]]:
    """An engine at rest whose GPU holds nothing but blocks that the tier lacks; what it has."""
    mini = Mini(blocks=49, load_mode="parked", store="auto", weighs=False, late=3)
    old = [long_prompt(14, seed=seed) for seed in (1, 2)]
    mini.only_in_cpu(*old)
    mini.manager._stores_ahead = False
    mini.tier._front._ahead = 0
    for seed in (3, 4, 5):
        mini.add(long_prompt(14, seed=seed), count=1)
        mini.run()
    mini.settle()
    return mini, old


def test_a_load_waits_for_no_stores_where_nothing_runs_that_would_hide_the_step() -> None:
    mini, (old, _) = full_of_what_is_not_stored()
    mini.add(old, count=1)
    mini.begin_step()
    assert mini.plans[-1].before and store_of(mini.plans[-1]) is None
    mini.end_step()
    mini.run()
    mini.check()


def test_a_load_waits_for_stores_where_a_request_waits_for_another() -> None:
    mini, (old, other) = full_of_what_is_not_stored()
    mini.add(old, count=1)
    mini.step()
    lost, plans = mini.manager.stats.overwritten, len(mini.plans)
    assert mini.tier._loads.under_way and not mini.scheduler.running
    again = mini.add(other, count=1)
    mini.step()
    (plan,) = mini.plans[plans:]
    assert store_of(plan) is not None and not plan.before
    mini.run()
    mini.check()
    assert mini.hits[again] and mini.manager.stats.overwritten == lost


def test_what_may_not_be_stored_is_not_after_a_reset_that_is_refused() -> None:
    from scheduler_half.scenarios import reset_refused

    assert reset_refused()["stored"]


@pytest.mark.parametrize("how", ["empty", "resize"])
def test_what_the_gpu_is_about_to_lose_is_stored_again_after_the_tier_has_forgotten_it(
    how: str,
) -> None:
    from scheduler_half.scenarios import prompt

    mini = Mini(store="lazy", blocks=49, weighs=False)
    for seed in (1, 20, 21, 22, 23):
        mini.add(prompt(6, seed=seed), count=1)
        mini.run()

    def steps() -> int:
        for _ in range(3):
            mini.begin_step()
            mini.end_step()
        mini.settle()
        return int(mini.manager.num_used)

    held = steps()
    sizes = [{"gib": slots * SLOT_BYTES / GIB} for slots in (1, mini.manager.num_slots)]
    for values in sizes if how == "resize" else [{}]:
        asked = mini.ask(how, **values)
        mini.begin_step()
        mini.end_step()
        assert not asked.error
    assert held > 2 and steps() >= held - 1
