"""vLLM's own search for a prefix: made over the tier, and its result given back."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import BLOCK, Mini
from scheduler_half.scenarios import prompt
from scheduler_half.states import STATE

MODES = ["inline", "parked"]


def count_searches(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each search that vLLM makes, whether it is for the tier."""
    prefix, searches = mini.view.prefix, list[bool]()
    search = prefix._search

    def counted(*args: Any) -> Any:
        searches.append(prefix._searching)
        return search(*args)

    monkeypatch.setattr(prefix, "_search", counted)
    return searches


def test_vllm_counts_a_request_once_however_often_it_is_looked_up_for_the_tier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some releases count in `get_computed_blocks`, where statistics are on."""
    mini, counted = Mini(), list[Any]()
    find = mini.kv_manager.get_computed_blocks

    def counting(request: Any) -> Any:
        if mini.kv_manager.log_stats:
            counted.append(request)
        return find(request)

    monkeypatch.setattr(mini.kv_manager, "get_computed_blocks", counting)
    request = mini.scheduler.requests[mini.add(prompt(6, seed=1))]
    mini.view.prefix.longest_hit(request, mini.pool)
    assert counted == []
    mini.run()
    assert counted == [request]


@pytest.mark.parametrize("load_mode", MODES)
@pytest.mark.parametrize("also_on_gpu", [False, True])
def test_vllm_does_not_search_for_what_was_loaded(
    load_mode: str, also_on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mini = Mini(load_mode=load_mode)
    asked = prompt(6, seed=1)
    mini.only_in_cpu(asked)
    if also_on_gpu:
        mini.add(asked[: 2 * BLOCK + 1], count=1)
        mini.run()
    searches = count_searches(mini, monkeypatch)
    name = mini.add(asked)
    mini.run()
    mini.check()
    assert mini.hits[name] == 6 * BLOCK
    assert searches == [True]


def test_what_the_gpu_has_is_searched_for_by_vllm_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    mini = Mini()
    mini.add(prompt(6, seed=1), count=1)
    mini.run()
    searches = count_searches(mini, monkeypatch)
    mini.add(prompt(6, seed=1), count=1)
    mini.run()
    assert searches == [True, False], "nobody holds it until the request is admitted"


@pytest.mark.parametrize("smaller", [False, True])
def test_a_prompt_whose_first_block_nobody_has_is_not_searched_for(
    smaller: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mini = Mini()
    size = getattr(mini.pool, "hash_block_size", None)
    if size is None:
        pytest.skip("up to 0.11 a pool does not say how many tokens a hash is of")
    if smaller:  # the first hash is of a part of a block then, which may be known as a whole
        monkeypatch.setattr(mini.pool, "hash_block_size", size // 2)
        mini.tier._admission._pool._hashes_blocks = mini.view.hashes_blocks()
        monkeypatch.undo()
    asked: list[Any] = []
    search = mini.view.prefix.longest_hit
    monkeypatch.setattr(
        mini.view.prefix, "longest_hit", lambda *how: asked.append(how) or search(*how)
    )
    mini.only_in_cpu(prompt(6, seed=1))
    assert bool(asked) == smaller
    name = mini.add(prompt(6, seed=1), count=1)
    mini.run()
    assert asked and mini.hits[name]


def test_blocks_of_the_gpu_behind_some_that_it_lacks_are_hit_where_they_are() -> None:
    mini = Mini(load_mode="inline")
    asked = prompt(6, seed=1)
    mini.add(asked, count=1)
    mini.run()
    mini.settle()
    find = mini.view.gpu_lookup()
    name = mini.add(asked)
    request = mini.scheduler.requests[name]
    blocks = mini.view.prefix.longest_hit(request, mini.pool)[0][0]
    lost = [blocks[1], blocks[4]]
    for block in lost:
        mini.pool._maybe_evict_cached_block(block)
    kept = [b.block_id for b in blocks if b not in lost]
    assert [find(b.block_hash) is not None for b in blocks if b not in lost] == [True] * 4
    found = mini.tier._admission._pool.look_up(request, 100)
    assert list(found.positions) == [1, 4] and list(found.ends) == [2 * BLOCK, 5 * BLOCK]
    assert [b.block_id for b in found.gpu_blocks] == kept
    assert found.gpu_tokens == BLOCK and found.tokens == 6 * BLOCK
    mini.run()
    mini.check()
    assert mini.hits[name] == 6 * BLOCK


def test_a_result_is_given_for_one_schedule_one_request_and_one_length() -> None:
    mini = Mini()
    asked = prompt(3, seed=1)
    mini.add(asked, count=1)
    mini.run()
    request = mini.scheduler.requests[mini.add(asked)]
    prefix, coordinator = mini.view.prefix, mini.kv_manager.coordinator
    mini.view.prefix.longest_hit(request, mini.pool)
    found = prefix.take_search()
    assert found is not None and prefix.take_search() is None
    hashes, length = found.block_hashes, found.max_cache_hit_length
    prefix.give(found)
    assert coordinator.find_longest_cache_hit(list(hashes), length) is not found.result
    assert coordinator.find_longest_cache_hit(hashes, length) is found.result
    assert coordinator.find_longest_cache_hit(hashes, length) is not found.result
    prefix.give(found)
    assert coordinator.find_longest_cache_hit(hashes, length - BLOCK) is not found.result
    prefix.give(found)
    mini.view.schedule_over()
    assert coordinator.find_longest_cache_hit(hashes, length) is not found.result


def test_where_a_result_cannot_be_given_vllm_searches_and_the_tier_is_detached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was loaded is in vLLM's own cache by then."""
    mini = Mini(load_mode="inline")
    asked = [prompt(3, seed=1), prompt(3, seed=2)]
    mini.only_in_cpu(*asked)
    prefix = mini.view.prefix
    give, fails = prefix.give, prefix.failed
    told = list[tuple[str, Exception]]()

    def failed(where: str, error: Exception) -> None:
        told.append((where, error))
        fails(where, error)

    monkeypatch.setattr(
        prefix, "give", lambda found: give(found._replace(result=None, may_grow=True))
    )
    monkeypatch.setattr(prefix, "failed", failed)
    names = [mini.add(one) for one in asked]
    mini.run()
    mini.check()
    assert [mini.hits[name] for name in names] == 2 * [3 * BLOCK]
    assert [where for where, _ in told] == ["find_longest_cache_hit"], "nor is more given"
    assert mini.breaker.detached


def test_a_parked_request_is_not_given_what_a_connector_has_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mini = Mini(load_mode="parked", late=3)
    asked = prompt(6, seed=1)
    mini.only_in_cpu(asked)
    mini.add(asked[: 2 * BLOCK + 1], count=1)
    mini.run()
    searches = count_searches(mini, monkeypatch)
    name = mini.add(asked)
    mini.step()
    (parked,) = mini.tier._loads._parked.values()
    assert len(parked.held) == 2 and name in mini.tier._loads._parked
    mini.pool._maybe_evict_cached_block(parked.held[1])
    mini.run()
    mini.check()
    assert False in searches


def test_a_state_whose_key_has_moved_to_a_copy_is_not_hit_before_it_is_made() -> None:
    """As in plain vLLM: its request writes to the block that had the key, by the same step."""
    mini = Mini(windows=(None, STATE), blocks=60, unit=4)
    if not mini.view.groups.parts:
        pytest.skip("this release has no hits that end within a block")
    asked = prompt(4, seed=1, tail=3)
    mini.add(asked, count=1)
    mini.run()
    producer = mini.scheduler.requests[mini.add(asked[: BLOCK + 14], count=40)]
    while producer.num_computed_tokens < BLOCK + 12:  # where its prompt's last key ends
        mini.step()
    coordinator, found = mini.kv_manager.coordinator, list[Any]()
    find = coordinator.find_longest_cache_hit
    coordinator.find_longest_cache_hit = lambda *how: found.append(find(*how)) or found[-1]
    name = mini.add([*asked[: 3 * BLOCK + 5], 7, 8, 9], count=5)
    mini.begin_step()
    given = found[-1]
    assert given[1:] == (BLOCK + 12, BLOCK + 4), "others have more of it"
    assert all(block.block_hash for hit in given[0] for block in hit if not block.is_null)
    assert name not in mini.hits
    mini.end_step()
    mini.run()
    mini.check()
    assert mini.hits[name] == BLOCK + 12


def test_the_search_is_vllms_own_again_in_the_end() -> None:
    mini = Mini()
    coordinator = mini.kv_manager.coordinator
    assert "find_longest_cache_hit" in vars(coordinator)
    mini.breaker.close()
    assert "find_longest_cache_hit" not in vars(coordinator)


@pytest.mark.parametrize("nth", [1, 2], ids=["before the search", "after it"])
def test_vllm_searches_its_own_pool_whenever_a_lookup_was_interrupted(
    nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who goes on would be given what stands for blocks that only the tier has."""
    mini = Mini()
    asked, left = prompt(6, seed=1), [nth]
    mini.only_in_cpu(asked)
    coordinator = mini.kv_manager.coordinator
    first = coordinator.single_type_managers[0]

    def interrupted(owner: Any, name: str, value: object) -> None:
        left[0] -= name == "block_pool" and owner is first
        if not left[0]:
            monkeypatch.undo()
            if nth == 2:
                raise KeyboardInterrupt
        object.__setattr__(owner, name, value)
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(type(first), "__setattr__", interrupted)
    mini.add(asked, count=3)
    with pytest.raises(KeyboardInterrupt):
        mini.run()
    mini.run()
    mini.check()
    assert mini.breaker.detached
    assert all(one.block_pool is mini.pool for one in (coordinator, first))
    assert mini.kv_manager.log_stats == mini.scheduler.log_stats
