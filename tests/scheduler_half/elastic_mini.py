"""`Mini` over a pool whose blocks lose their memory, and what is played on it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from integration.engine.mini import BLOCK, Mini
from scheduler_half import parts
from scheduler_half.device import Device
from scheduler_half.scenarios import talk
from scheduler_half.vmm_ops import MEMORY

from kvoffload_patch.integration import kvcached
from kvoffload_patch.links import GPU, LOAD, Link
from kvoffload_patch.plan import Transfer

Facts = dict[str, Any]
PAGE_BLOCKS = 4
_NO_MEMORY = -1


class ElasticDevice(Device):
    """A device on which a block without memory cannot be copied, and holds nothing afterwards."""

    def blocks_lost(self, block_ids: Sequence[int]) -> None:
        """These have no memory any more, or other memory."""
        for block_id in block_ids:
            if block_id < len(self.kv):
                self.kv[block_id][:] = [_NO_MEMORY] * self.size

    def _copy(self, link: Link, transfer: Transfer) -> None:
        ids = transfer.source_ids if link[0] == GPU else transfer.target_ids
        gone = [block_id for block_id in ids if not self.has_memory(block_id)]
        assert not gone, f"copy {transfer.ticket} from {link[0]}: blocks {gone} have no memory"
        super()._copy(link, transfer)

    has_memory: Callable[[int], bool]


class ElasticMini(Mini):
    """A `Mini` whose pool is kvcached's, or stands in for it.

    Args:
        limit: blocks that may be kept unused, where the pool stands in for it.
        kept: pages that are given back and keep their memory.
    """

    def __init__(self, limit: int = 10, kept: int = 0, **about: Any) -> None:
        self.limit, self.kept = limit, kept
        super().__init__(**{"store": "eager", **about})

    def _make_scheduler(self, *about: Any, **more: Any) -> None:
        MEMORY.begin(self.kept)
        self.device.__class__ = ElasticDevice
        self.device.has_memory = lambda block_id: self.page_of(block_id) in MEMORY.mapped
        MEMORY.on_map = MEMORY.on_unmap = self._page_changed
        super()._make_scheduler(*about, **more)
        if not kvcached.is_elastic(self.pool):
            from scheduler_half.elastic_stand_in import put_into

            put_into(self.scheduler, PAGE_BLOCKS, self.limit, self.in_flight > 1)
            self.pool = self.kv_manager.block_pool
        assert kvcached.is_elastic(self.pool)
        self.memory = self.pool.kv_cache_manager
        self.memory._wait_post_init()

    def page_of(self, block_id: int) -> int:
        """The page of a block."""
        return int(block_id * self.memory.block_mem_size // self.memory.page_size)

    def _page_changed(self, page: int) -> None:
        count = len(self.device.kv)
        memory = getattr(self, "memory", None)
        if memory is not None:
            self.device.blocks_lost([b for b in range(count) if self.page_of(b) == page])

    def end_step(self) -> None:
        """As a step of kvcached's engine core ends: pages that have been given up are unmapped."""
        super().end_step()
        if self.memory.defer_physical_release:
            self.memory.release_retired_pages_through(self.memory.capture_physical_release_marker())

    def nothing_held(self) -> None:
        """All that is left of what was played are blocks that may be evicted."""
        self.settle()
        self.begin_step()
        self.end_step()
        self.settle()
        assert not any(kept for kept in self.tier._refs._kept.values()), "copies hold blocks"
        used = [block.block_id for block in self.pool.blocks if block.ref_cnt]
        assert not used, f"blocks {used} are held"
        assert self.scheduler.reset_prefix_cache(), "the prefix cache was not reset"
        assert self.memory._get_num_alloced_blocks() == 1, "GPU blocks were lost"
        assert not self.manager.busy and not self.tier._lookups._results


def conversations(make: Callable[..., Any], runs: int = 60) -> Facts:
    """Random engines and conversations, copies late by none to three steps."""
    seen = dict.fromkeys(("loaded", "stored", "evicted", "unmaps"), 0)
    for seed in range(runs):
        rng = random.Random(seed)
        mini = make(
            load_mode=rng.choice(["auto", "parked", "inline"]),
            eviction=rng.choice(["lru", "arc"]),
            late=rng.randrange(4),
            in_flight=rng.choice([1, 1, 2, 3]),
            blocks=rng.choice([25, 33, 49, 81]),
            num_slots=rng.choice([20, 60, 400]),
            limit=rng.choice([0, 5, 10, 40, -1]),
            kept=rng.choice([0, 0, 2]),
            step_ms=rng.choice([0, 3, 30]),
        )
        talk(mini, seed, talks=8)
        stats = mini.manager.stats
        for name in ("loaded", "stored", "evicted"):
            seen[name] += getattr(stats, name)
        seen["unmaps"] += MEMORY.unmaps
        mini.nothing_held()
    assert all(seen.values()), seen
    return seen


def question(blocks: int, seed: int, tail: int = 1) -> list[int]:
    """A prompt of so many full blocks, and ``tail`` tokens behind them."""
    rng = random.Random(seed)
    return [rng.randrange(3, 999) for _ in range(blocks * BLOCK + tail)]


def stores_outlive_their_request(make: Callable[..., Any]) -> Facts:
    """Nothing is kept unused, so a request's blocks lose their memory with it, but for copies."""
    mini = make(limit=0, late=3, blocks=25)
    asked = question(6, 1)
    mini.add(asked, count=1)
    mini.run()
    assert mini.manager.busy, "its copies are over"
    held = [block.block_id for block in mini.pool.blocks if block.ref_cnt and not block.is_null]
    assert len(held) == 6
    before = MEMORY.unmaps
    mini.settle()
    assert MEMORY.unmaps > before, "its blocks keep their memory"
    mini.add(asked, count=3)
    mini.run()
    mini.check()
    assert mini.manager.stats.loaded == 6
    mini.nothing_held()
    return {"held": len(held)}


def loads_outlive_what_they_were_for(make: Callable[..., Any]) -> Facts:
    """The request for which blocks are loaded is not admitted, and nothing is kept unused."""
    mini = make(limit=0, load_mode="inline", late=3, blocks=25)
    asked = question(6, 2)
    mini.only_in_cpu(asked)
    mini.add(asked, count=3)
    allocate, mini.kv_manager.allocate_slots = mini.kv_manager.allocate_slots, lambda *_, **__: None
    mini.begin_step()
    mini.kv_manager.allocate_slots = allocate
    mini.end_step()
    mini.run()
    mini.check()
    mini.nothing_held()
    return {"loaded": mini.manager.stats.loaded}


def last_blocks(make: Callable[..., Any]) -> Facts:
    """The last block of a prompt of whole blocks is loaded into the block that vLLM gave it."""
    mini = make(limit=0, load_mode="inline", blocks=25)
    asked = question(6, 3, tail=0)
    mini.only_in_cpu(asked)
    mini.add(asked, count=3)
    mini.begin_step()
    kept = [block for _, blocks in mini.tier._refs._kept[LOAD] for block in blocks]
    assert len(kept) == 6 and all(block.ref_cnt > 1 for block in kept)
    mini.end_step()
    mini.run()
    mini.check()
    mini.nothing_held()
    return {"loaded": mini.manager.stats.loaded}


def evicted_blocks_are_no_hits(make: Callable[..., Any]) -> Facts:
    """A lookup that is kept does not outlive the blocks that it rests on."""
    mini = make(limit=-1, blocks=49)
    asked = question(5, 4)
    mini.add(asked, count=1)
    mini.run()
    mini.settle()
    waiting = parts.make_request("waiting", asked, 1)
    found = mini.tier._admission._pool.look_up(waiting, 9)
    assert len(found.gpu_blocks) == 5
    mini.tier._lookups.put("waiting", found)
    mini.tier._lookups.end_step()
    mini.pool._evict_blocks_from_pool(2)
    mini.begin_step()
    mini.end_step()
    assert mini.tier._lookups.get("waiting", waiting.num_tokens) is None
    mini.nothing_held()
    return {"evicted": 2}


def reset_while_storing(make: Callable[..., Any]) -> Facts:
    """vLLM resets no prefix cache that has a block in use."""
    mini = make(limit=-1, late=3)
    mini.add(question(6, 5), count=1)
    mini.run()
    assert mini.manager.busy
    assert mini.scheduler.reset_prefix_cache()
    mini.nothing_held()
    return {}


def memory_taken_by_others(make: Callable[..., Any]) -> Facts:
    """Blocks that were counted are not there: the load waits, as for any room."""
    seen = {"refused": 0}
    for load_mode in ("inline", "parked"):
        mini = make(limit=40, load_mode=load_mode, blocks=49)
        asked = question(6, 6)
        mini.only_in_cpu(asked)
        mini.add(asked[: 2 * BLOCK] + question(1, 7), count=20)  # a part of it is on the GPU
        for _ in range(4):
            mini.step()
        mini.add(asked, count=3)
        MEMORY.refused, loads = 2, mini.tier._loads  # kvcached asks twice
        before = loads.num_inline + loads.num_parked_ever
        assert before
        mini.step()
        assert MEMORY.refused < 2 and not mini.breaker.detached
        assert loads.num_inline + loads.num_parked_ever == before
        seen["refused"] += 1
        mini.run()
        mini.check()
        mini.nothing_held()
    return seen


def memory_limited(make: Callable[..., Any]) -> Facts:
    """The pool is given fewer pages, and more again; loads take no more than there is."""
    mini = make(limit=40, blocks=49, late=2)
    most = 0
    for pages in (12, 7, 9, 12):
        mini.memory.resize(pages * mini.memory.page_size)
        talk(mini, pages, turns=2, talks=6)
        most = max(most, len(MEMORY.mapped))
        if pages == 7:
            assert len(MEMORY.mapped) <= pages
    mini.nothing_held()
    return {"mapped": most, "loaded": mini.manager.stats.loaded}


def one_coordinator(make: Callable[..., Any]) -> Facts:
    """kvcached gives each coordinator of a process a pool; the tier makes none."""
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    made, init = list[Any](), KVCacheCoordinator.__init__

    def count(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        init(self, *args, **kwargs)

    KVCacheCoordinator.__init__ = count
    try:
        mini = make()
        talk(mini, 10, turns=2, talks=8)
    finally:
        KVCacheCoordinator.__init__ = init
    assert made == [mini.kv_manager.coordinator] and mini.manager.stats.loaded
    return {"made": len(made)}


def detached(make: Callable[..., Any]) -> Facts:
    """A tier that fails gives everything back, and the pool evicts as ever."""
    mini = make(limit=10, late=3)
    talk(mini, 8, turns=2, talks=8)
    mini.add(question(6, 9), count=3)
    mini.step()

    def fail(*_: Any) -> None:
        raise RuntimeError("as the test has it")

    mini.tier.before_schedule = fail
    mini.run()
    assert mini.breaker.detached
    mini.check()
    assert not [b.block_id for b in mini.pool.blocks if b.ref_cnt and not b.is_null]
    assert not {"_remove_cached_block_hashes", "get_new_blocks"} & set(vars(mini.pool))
    assert mini.scheduler.reset_prefix_cache()
    return {}


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        stores_outlive_their_request,
        loads_outlive_what_they_were_for,
        last_blocks,
        evicted_blocks_are_no_hits,
        reset_while_storing,
        memory_taken_by_others,
        memory_limited,
        one_coordinator,
        detached,
        conversations,
    )
}
