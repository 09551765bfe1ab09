"""What a request takes of each KV cache group, those outside of the prefix cache included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import BLOCK, Mini
from integration.engine.random_shapes import keeps_the_end
from scheduler_half.device import Replay, Ring
from scheduler_half.scenarios import prompt
from scheduler_half.states import EVERY, STATE
from vllm.v1 import kv_cache_interface
from vllm.v1.core.sched.scheduler import Scheduler

from kvoffload_patch.integration.engine.adapters.prefix_groups import split
from kvoffload_patch.integration.engine.adapters.vllm_groups import (
    CacheGroups,
    draft_states_held,
    is_cached,
    is_ring,
    keeps_state,
    leaves_last_out,
    states_held,
)
from kvoffload_patch.integration.engine.requests.admission import AdmissionBudget
from kvoffload_patch.integration.install import older_than

WINDOW = 40
SHAPES = [(None, Replay(WINDOW)), (Replay(WINDOW), None, Ring(8))]
replays = pytest.mark.skipif(
    not hasattr(kv_cache_interface.KVCacheSpec, "prefix_replay_tokens"),
    reason="this vLLM has no window that it fills again behind a hit",
)
every = pytest.mark.skipif(
    older_than("0.17") or not older_than("0.33"),
    reason="this vLLM has no manager of states at every block",
)
reserves_all = pytest.mark.skipif(
    "scheduler_reserve_full_isl" not in Scheduler.__init__.__code__.co_names,
    reason="this vLLM admits a request where there is room for its first step",
)


def spec(kind: str, **fields: Any) -> Any:
    """A KV cache spec of a class with this name."""
    made = type(kind, (), {})()
    vars(made).update(fields)
    return made


def groups(*specs: Any, steps_of: int = 64, **scheduler: Any) -> CacheGroups:
    """Those of a scheduler that gives a step so many tokens."""
    managers = [SimpleNamespace(kv_cache_spec=one, block_size=one.block_size) for one in specs]
    return groups_of(managers, steps_of, **scheduler)


def groups_of(managers: list[Any], steps_of: int = 64, **scheduler: Any) -> CacheGroups:
    about = {"num_lookahead_tokens": 0, "max_num_scheduled_tokens": steps_of, **scheduler}
    about.setdefault("kv_cache_manager", SimpleNamespace(coordinator=SimpleNamespace()))
    return CacheGroups(SimpleNamespace(**about), managers)


def takes_parts() -> bool:
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator

    return hasattr(HybridKVCacheCoordinator, "enable_partial_hash_hits")


def mini_of(windows: tuple[Any, ...], **more: Any) -> Mini:
    return Mini(
        load_mode="inline", store="eager", windows=windows,
        **{"blocks": 120, "num_slots": 400, **more},
    )  # fmt: skip


def test_a_checkpoint_is_one_state_more() -> None:
    plain, leaves = spec("MambaSpec"), spec("MambaSpec", num_prefill_checkpoint_blocks=1)
    both = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": plain, "b": leaves})
    assert [keeps_state(one) for one in (plain, leaves, both)] == [True] * 3
    assert [states_held(one) for one in (plain, leaves, both)] == [2, 3, 3]
    drafted, attends = spec("MambaSpec", num_speculative_blocks=3), spec("FullAttentionSpec")
    assert not keeps_state(attends) and draft_states_held([plain, attends]) == 0
    assert draft_states_held([drafted, attends, drafted]) == 6
    some = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": plain, "b": drafted})
    assert draft_states_held([some]) == 3, "as many as any of its layers"


def test_beside_a_drafting_model_some_group_leaves_its_last_block_out() -> None:
    def says(*by_manager: bool, **fields: Any) -> bool:
        managers = [SimpleNamespace(use_eagle=on) for on in by_manager] or [SimpleNamespace()]
        return leaves_last_out(SimpleNamespace(single_type_managers=managers, **fields))

    assert says(False, True) and not says(False, False)
    assert not says(False, eagle_group_ids={0}), "0.33 has it there though it leaves nothing out"
    assert says(use_eagle=True) and not says(use_eagle=False)  # up to 0.19
    assert says(eagle_group_ids={1}) and not says(eagle_group_ids=set())  # up to 0.22


def test_a_ring_takes_one_block_of_a_request_whatever_its_length() -> None:
    ring = spec("CircularBufferSpec", block_size=8, prefix_cacheable=False)
    many = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": ring}, block_size=8)
    full = spec("FullAttentionSpec", block_size=BLOCK)
    assert is_ring(ring) and is_ring(many) and not is_ring(full)
    assert is_cached(full) and not is_cached(ring)
    for one in (ring, many):
        both = groups(full, one)
        assert both.cached_sizes == (BLOCK, 8)[: 1 + is_cached(one)]
        assert both.blocks_for(1) == 2 and both.blocks_for(20 * BLOCK) == 21
        assert both.decode_blocks == 1
        begun = SimpleNamespace(num_computed_tokens=BLOCK)
        assert both.new_blocks(begun, 3 * BLOCK) == 3


def test_a_decode_takes_the_tokens_of_its_drafts_and_blocks_for_what_is_drafted_next() -> None:
    full = spec("FullAttentionSpec", block_size=BLOCK)
    plain = groups(full, full)
    assert (plain.decode_tokens, plain.decode_blocks) == (1, 2)
    for ahead, blocks in ((BLOCK - 4, 1), (BLOCK - 3, 2)):
        drafts = groups(full, num_spec_tokens=3, num_lookahead_tokens=ahead)
        assert (drafts.decode_tokens, drafts.decode_blocks) == (1 + 3, blocks)


def test_a_window_of_many_layers_is_that_of_one() -> None:
    window = spec("SlidingWindowSpec", sliding_window=32, block_size=BLOCK)
    many = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": window}, block_size=BLOCK)
    for one in (window, many):
        assert groups(one).blocks_for(50 * BLOCK) == (32 + 64) // BLOCK + 1


def test_however_long_a_prompt_is_it_takes_a_window_a_chunk_or_two_states_of_a_group() -> None:
    """What it does not need would keep its hit waiting for room."""
    window = spec("SlidingWindowSpec", sliding_window=32, block_size=BLOCK)
    chunk = spec("ChunkedLocalAttentionSpec", attention_chunk_size=32, block_size=BLOCK)
    for one, more in ((window, 1), (chunk, 0)):  # a window may begin within a block
        assert groups(one).blocks_for(50 * BLOCK) == (32 + 64) // BLOCK + more
        assert groups(one).blocks_for(BLOCK) == 1
    state = spec("MambaSpec", block_size=BLOCK)
    assert groups(state).blocks_for(50 * BLOCK) == 2
    begun = SimpleNamespace(num_computed_tokens=BLOCK)
    more = (0, 1, 2 * BLOCK, 9 * BLOCK)
    assert [groups(state).new_blocks(begun, tokens) for tokens in more] == [0, 1, 2, 2]


def test_of_states_at_every_block_a_request_takes_those_that_a_step_computes() -> None:
    """And the one that it begins behind, as of a window that sees the token before alone."""
    state = spec("MambaSpec", block_size=BLOCK, mamba_cache_mode="all")
    many = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": state}, block_size=BLOCK)
    begun = SimpleNamespace(num_computed_tokens=BLOCK)
    for one in (state, many):
        made = groups(one)
        assert set(made.states) == {0} and states_held(one) > 10**9
        assert [made.blocks_for(n * BLOCK) for n in (1, 2, 50)] == [1, 2, 64 // BLOCK + 2]
        assert made.blocks_for(41 * BLOCK, 40 * BLOCK) == 2
        assert [made.new_blocks(begun, tokens) for tokens in (0, 1, 9 * BLOCK)] == [0, 1, 9]
        reserved = groups(one, scheduler_reserve_full_isl=True)
        assert reserved.blocks_for(50 * BLOCK) == 50
        assert reserved.blocks_for(50 * BLOCK, 40 * BLOCK) == 11


def test_what_a_window_does_not_reach_behind_a_hit_takes_no_blocks() -> None:
    full = spec("FullAttentionSpec", block_size=BLOCK)
    window = spec("SlidingWindowSpec", sliding_window=32, block_size=BLOCK)
    chunk = spec("ChunkedLocalAttentionSpec", attention_chunk_size=32, block_size=BLOCK)
    hit, more = 40 * BLOCK, BLOCK
    assert groups(full).blocks_for(hit + more, hit) == (hit + more) // BLOCK
    # Of 32 tokens the first one is in the block before.
    assert groups(window).blocks_for(hit + more, hit) == 32 // BLOCK + 1
    for tokens, blocks in ((33, 2), (34, 3)):  # the token behind the hit is one of them
        other = spec("SlidingWindowSpec", sliding_window=tokens, block_size=BLOCK)
        assert groups(other).blocks_for(hit + more, hit) == blocks + 1
    assert groups(chunk).blocks_for(hit + more, hit) == 1
    assert groups(chunk).blocks_for(hit + more, hit - 1) == 32 // BLOCK + 1
    assert groups(window).blocks_for(hit + more, 31) == (32 + 64) // BLOCK + 1


@reserves_all
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("hit", [0, 2, 30])
@pytest.mark.parametrize("kind", [WINDOW, pytest.param(EVERY, marks=every)])
def test_a_prompt_longer_than_a_window_and_a_step_needs_what_vllm_asks_room_for(
    steps: int, hit: int, kind: Any
) -> None:
    """With less, those behind it hold what it lacks, for ever where nothing runs.

    vLLM counts a block for a window that begins within one, and each step that may be under way; of
    states at every block it counts all.
    """
    for lacks in (1, 0):
        mini = mini_of((None, kind), in_flight=steps, lookahead=5)
        if hit:
            mini.add(prompt(hit, seed=1), count=1)
            mini.run()
        name = mini.add([*prompt(hit, seed=1, tail=0), *prompt(40 - hit, seed=2, tail=2)], count=2)
        request, budget = mini.scheduler.requests[name], AdmissionBudget(mini.view)
        found = mini.tier._admission._pool.look_up(request, 0)
        assert found.tokens == hit * BLOCK and budget.fits(request, found.tokens, found.gpu_blocks)
        free = mini.pool.get_num_free_blocks()
        mini.pool.get_new_blocks(free - budget.needed + lacks)
        assert len(mini.begin_step().scheduled_new_reqs) == 1 - lacks


def test_room_for_all_of_a_prompt_is_asked_for_in_each_group_where_vllm_does() -> None:
    """In 0.19 it counts each block of a prompt, whatever the window; from 0.20 on up to a cap."""
    window = spec("SlidingWindowSpec", sliding_window=32, block_size=BLOCK)
    kept = (32 + 64) // BLOCK + 1
    assert groups(window, num_lookahead_tokens=5).blocks_for(50 * BLOCK) == kept + 1
    all_of_it = groups(window, scheduler_reserve_full_isl=True)
    assert all_of_it.blocks_for(50 * BLOCK) == 50
    assert all_of_it.blocks_for(50 * BLOCK, 40 * BLOCK) == 50 - 38
    assert groups(window, scheduler_reserve_full_isl=False).blocks_for(50 * BLOCK) == kept
    for name in ("_max_admission_blocks_per_request", "max_admission_blocks_per_request"):
        for cap in (kept - 1, kept, kept + 4):
            manager = SimpleNamespace(kv_cache_spec=window, block_size=BLOCK, **{name: cap})
            capped = groups_of([manager], scheduler_reserve_full_isl=True)
            assert capped.blocks_for(50 * BLOCK) == max(cap, kept)
            assert capped.blocks_for(2 * BLOCK) == 2


def test_what_is_computed_again_takes_tokens_of_the_step_and_no_blocks() -> None:
    full = spec("FullAttentionSpec", block_size=BLOCK)
    window = spec("SlidingWindowMLASpec", block_size=BLOCK, sliding_window=2 * BLOCK)
    both = groups(full, window, prefix_replay_tokens=2 * BLOCK)
    assert both.computed_from(0) == 0 and both.computed_from(5 * BLOCK) == 3 * BLOCK
    again = SimpleNamespace(num_computed_tokens=3 * BLOCK, replay_start=3 * BLOCK)
    assert both.new_blocks(again, BLOCK) == 0  # it ends within what the hit has brought
    assert both.new_blocks(again, 3 * BLOCK) == 2
    first = SimpleNamespace(num_computed_tokens=3 * BLOCK, replay_start=0)
    assert both.new_blocks(first, BLOCK) == 2


@replays
@pytest.mark.parametrize("windows", SHAPES)
@pytest.mark.parametrize("step", [0, 24])
def test_a_hit_of_the_tier_leaves_what_a_hit_of_vllms_own_leaves(
    windows: tuple[Any, ...], step: int
) -> None:
    """The same tokens computed again, from the same one on; the same blocks, the same keys."""
    own, tier = (_hit(windows, step, lose) for lose in (False, True))
    assert own.pop("loaded") == 0 and tier.pop("loaded") == 20
    assert own.pop("stored") == tier.pop("stored") == 20 + 2, "those of the cached group alone"
    assert own == tier
    assert own["replay_start"] == own["steps"][0][0] == 20 * BLOCK - WINDOW


def _hit(windows: tuple[Any, ...], step: int, lose: bool) -> dict[str, Any]:
    """What a request with a hit of 20 blocks looks like, in each of its steps."""
    mini = mini_of(windows, limits={"long_prefill_token_threshold": step})
    asked = prompt(20, seed=1, tail=3)
    mini.add(asked, count=1)
    mini.run()
    mini.settle()
    if lose:
        mini.pool.free_blocks(mini.pool.get_new_blocks(mini.pool.get_num_free_blocks()))
    name = mini.add([*asked, *prompt(2, seed=2)], count=3)
    request, steps = mini.scheduler.requests[name], list[Any]()
    while name in mini.scheduler.requests:
        before = request.num_computed_tokens
        scheduled = mini.begin_step()
        tokens = scheduled.num_scheduled_tokens[name]
        tables = mini.kv_manager.get_blocks(name).blocks
        seen = [[block.is_null or block.block_hash for block in table] for table in tables]
        start = request.num_computed_tokens - tokens
        steps.append((start if before == 0 else before, tokens, seen))
        mini.end_step()
    mini.settle()
    mini.check()
    return {
        "steps": steps, "replay_start": request.replay_start, "again": mini.device.replayed,
        "loaded": mini.manager.stats.loaded, "stored": mini.manager.stats.stored,
    }  # fmt: skip


@replays
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_hit_that_vllm_would_compute_again_is_not_loaded(blocks: int) -> None:
    mini = mini_of((None, Replay(2 * BLOCK)))
    mini.only_in_cpu(prompt(blocks, seed=1, tail=3))
    name = mini.add(prompt(blocks, seed=1, tail=3), count=2)
    mini.run()
    mini.check()
    counts, hit = mini.tier.counts(), blocks * BLOCK if blocks > 2 else 0
    assert mini.manager.stats.loaded == hit // BLOCK and counts.hit == hit
    assert mini.hits[name] == max(0, hit - 2 * BLOCK)


@replays
def test_room_is_asked_for_what_a_request_keeps_and_a_ring_is_one_block() -> None:
    """The prompt's 37 blocks, those of a window and a step, and one of the ring: no more than 60.

    So vLLM admits it, and a tier that asks for a ring as long as the prompt would let it be
    computed.
    """
    windows = (None, Replay(2 * BLOCK), Ring(8))
    mini = mini_of(windows, blocks=80, limits={"long_prefill_token_threshold": BLOCK})
    mini.only_in_cpu(prompt(36, seed=1))
    taken = mini.pool.get_new_blocks(mini.pool.get_num_free_blocks() - 60)
    name = mini.add(prompt(36, seed=1), count=3)
    while mini.scheduler.has_unfinished_requests() or mini.queue:
        free, exact = mini.pool.get_num_free_blocks(), mini.view.count_blocks_for_running()
        running = len(mini.scheduler.running)
        mini.step()
        if running and mini.scheduler.running:
            assert free - mini.pool.get_num_free_blocks() <= exact
    mini.check()
    mini.pool.free_blocks(taken)
    assert mini.hits[name] == 34 * BLOCK


@replays
def test_what_is_computed_again_is_reckoned_with_the_tokens_of_a_step() -> None:
    """Each of three hits leaves 3 tokens, and takes 43: a step of 64 has room for two."""
    mini = mini_of((None, Replay(WINDOW)), limits={"max_num_batched_tokens": 64})
    prompts = [prompt(5, seed=seed, tail=3) for seed in range(3)]
    mini.only_in_cpu(*prompts)
    names = [mini.add(one, count=2) for one in prompts]
    scheduled = mini.begin_step()
    assert set(scheduled.num_scheduled_tokens) == set(names[:2])
    assert mini.tier.counts().inline == 2, "a load of whom the step does not compute"
    mini.end_step()
    mini.run()
    mini.check()


def test_windows_of_layers_in_one_group_free_no_blocks() -> None:
    """As with the hybrid KV cache manager off."""
    pytest.importorskip("vllm")
    from scheduler_half.scenarios import window_without_groups

    assert window_without_groups()["loaded"] == 70


@pytest.mark.skipif(not hasattr(kv_cache_interface, "MambaSpec"), reason="no states")
def test_a_block_in_which_a_hit_ends_is_copied() -> None:
    """A hit that may end within a block takes a block more of each group."""
    specs = [spec("FullAttentionSpec", block_size=16), spec("MambaSpec", block_size=16)]
    coordinator = SimpleNamespace(enable_partial_hash_hits=True)
    plain = groups(*specs, steps_of=256)
    parts = groups(*specs, steps_of=256, kv_cache_manager=SimpleNamespace(coordinator=coordinator))
    assert parts.parts and not plain.parts
    assert parts.blocks_for(100) == plain.blocks_for(100)
    assert parts.blocks_for(100, 20) == plain.blocks_for(100, 20) + 2
    # The state behind a prompt's last whole part goes to a block of its own in the next step.
    assert parts.decode_blocks == plain.decode_blocks + 1
    running = SimpleNamespace(num_computed_tokens=20)
    assert parts.new_blocks(running, 1) == plain.new_blocks(running, 1) + 1


@pytest.mark.skipif(not takes_parts(), reason="this vLLM has no hits that end within a block")
def test_whole_blocks_of_a_group_have_its_own_number_of_tokens() -> None:
    """Two ranks have a part of each block of attention, and states as a whole."""
    mini = Mini(windows=(STATE, None), shards=2, blocks=60)
    mini.add(prompt(3, seed=1, tail=4), count=1)
    mini.run()
    cached = [block for block in mini.pool.blocks if block.block_hash is not None]
    whole = {
        (split(block.block_hash)[1], block.block_hash_num_tokens): key is not None
        for block, key in zip(cached, mini.view.keys_in(cached))
    }
    assert whole == {(0, 48): True, (1, 32): True, (1, 48): False}


@pytest.mark.skipif(not takes_parts(), reason="this vLLM has no hits that end within a block")
def test_a_hit_within_a_block_is_admitted_into_as_many_blocks_as_are_counted() -> None:
    tight = 0
    for tail in range(1, BLOCK):
        mini = Mini(tier=False, windows=(None, STATE), blocks=60, unit=4)
        counted = CacheGroups(mini.scheduler, mini.kv_manager.coordinator.single_type_managers)
        begin = prompt(2, seed=tail, tail=tail)
        mini.add(begin, count=1)
        mini.run()
        asked = [*begin, *prompt(1, seed=99)]
        hit = (len(begin) - (not keeps_the_end())) // 4 * 4
        free, needed = mini.pool.get_num_free_blocks(), counted.blocks_for(len(asked), hit)
        mini.pool.get_new_blocks(free - needed)  # used least recently: not those of the prefix
        name = mini.add(asked, count=1)
        assert name in mini.begin_step().num_scheduled_tokens
        assert mini.hits[name] == hit
        mini.end_step()
        mini.run()
        mini.check()
        tight += needed - counted.blocks_for(len(asked)) > 0
    assert tight, "no hit has ended within a block"
