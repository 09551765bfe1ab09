"""What is told of requests that have ended, so that their blocks leave the tier together."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import BLOCK, Mini
from scheduler_half import parts
from scheduler_half.scenarios import prompt

from kvoffload_patch.config import EVICTIONS
from kvoffload_patch.integration.engine.requests.lookup import LookupResult
from kvoffload_patch.tier.prefix_share import PrefixShare


def hashes(tokens: list[int]) -> list[Any]:
    return list(parts.make_request("asked", tokens, 1).block_hashes)


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_what_was_stored_or_loaded_at_once_is_not_put_together_again(
    load_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mini = Mini(load_mode=load_mode)
    told: list[Any] = []
    monkeypatch.setattr(
        mini.manager, "request_ended", lambda keys, together: told.append((len(keys), together))
    )
    asked = prompt(6, seed=1)
    mini.only_in_cpu(asked)
    assert told == [(6, False)], "but each rests on the one before it"
    name = mini.add(asked, count=1)
    mini.run()
    mini.step()
    assert mini.hits[name] and len(told) == 1, "which is known"
    mini.add(asked + prompt(2, seed=2), count=1)
    mini.run()
    mini.step()
    assert told[1:] == [(8, True)]


def test_a_block_that_a_load_fills_is_not_stored_for_another_that_waits_for_it() -> None:
    """It has no key yet, and nobody would find what is stored without one."""
    mini = Mini(load_mode="parked", late=3, store="eager")
    asked = prompt(6, seed=1)
    mini.only_in_cpu(asked)
    for _ in range(2):
        mini.add(asked, count=1)
    mini.run()
    mini.settle()
    assert mini.manager.stats.loaded == 6 and mini.manager.stats.stored == 6
    assert not mini.manager.holds(None)


def test_what_is_computed_twice_is_told_once_where_it_came_first() -> None:
    """A block that came to rest on itself would have the tier look for a tail for ever."""
    mini = Mini(blocks=13, num_slots=40, store="eager", load_mode="inline", weighs=False)
    mini.tier.pause()  # so that one that is preempted is not looked up again
    asked = [prompt(4, seed=seed) for seed in (1, 2)]
    for tokens in asked:
        mini.add(tokens, count=3 * BLOCK)
    told: list[Any] = []
    wrapped = mini.manager.request_ended
    mini.manager.request_ended = lambda keys, *how: (  # type: ignore[method-assign]
        told.append(keys),
        wrapped(keys, *how),
    )
    mini.run()
    mini.step()
    assert mini.device.resumed, "this test shows nothing"
    keys = [[mini.view.key(h, 0) for h in hashes(tokens)] for tokens in asked]
    assert sorted(made[:4] for made in told) == sorted(keys)
    assert all(len(made) == len({*made}) for made in told)


@pytest.mark.parametrize("more", [[], ["computed"]])
def test_what_anothers_load_has_filled_is_told_with_that_alone(
    more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had no key yet; what comes behind a key that the tier lacks would leave next."""
    mini, asked = Mini(gpu_prefixes="auto"), prompt(2, seed=1)
    mini.only_in_cpu(asked)
    mini.add(asked, count=1)
    mini.run()
    find, (key, _) = mini.view.gpu_lookup(), (mini.view.key(one, 0) for one in hashes(asked))
    shares, tiers = list[Any](), list[Any]()
    monkeypatch.setattr(
        PrefixShare, "ended", lambda _, keys, hit, *how: shares.append((keys, hit.blocks)) or ()
    )
    monkeypatch.setattr(mini.manager, "request_ended", lambda keys, *how: tiers.append(keys))
    recency, found = mini.tier._recency, LookupResult(3 * BLOCK)
    arriving = mini.pool.get_new_blocks(1)
    found.gpu_blocks, found.tokens = [find(key), *arriving], 2 * BLOCK
    recency.note("a request", found)
    if more:
        recency.computes("a request", more)
    recency.ended(["a request"])
    assert shares == [([key, *more], 1)] and tiers == [[key, *more]] * len(more)


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_a_prefix_is_told_in_order_though_the_gpu_has_lost_its_middle(
    load_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mini = Mini(load_mode=load_mode)
    asked = prompt(6, seed=1)
    mini.only_in_cpu(asked)
    mini.add(asked, count=1)
    mini.run()
    mini.step()
    find, made_of = mini.view.gpu_lookup(), hashes(asked)
    mini.view.adapter.uncache([find(mini.view.key(one, 0)) for one in made_of[1:4]])
    told: list[Any] = []
    monkeypatch.setattr(mini.manager, "request_ended", lambda keys, together: told.append(keys))
    longer, before = asked + prompt(2, seed=2), mini.manager.stats.loaded
    mini.add(longer, count=1)
    mini.run()
    mini.step()
    assert mini.manager.stats.loaded == before + 3
    assert told == [[mini.view.key(one, 0) for one in hashes(longer)]]


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_a_session_leaves_the_tier_from_its_tail_whichever_turn_has_computed_it(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mini = Mini(blocks=40, store=store)
    told: list[Any] = []
    monkeypatch.setattr(mini.manager, "request_ended", lambda *how: told.append(how))
    said = prompt(3, seed=1)
    name = mini.add(said, count=1, resumable=True)
    mini.run()
    for more in (prompt(2, seed=2), prompt(2, seed=3)):
        said = said + more
        mini.scheduler.add_request(parts.make_request(name, more, 1, size=BLOCK, resumable=True))
        mini.run()
    mini.scheduler.add_request(parts.make_request(name, [3], 1, size=BLOCK, resumable=False))
    mini.step()
    assert told == [([mini.view.key(one, 0) for one in hashes(said)], True)]
    assert name not in mini.tier._recency.keys


@pytest.mark.parametrize("kept", ["auto", "whole"])
@pytest.mark.parametrize("windows", [(None, 40), (40, None), (None, 40, None)])
def test_blocks_of_other_groups_rest_on_those_of_full_attention(
    windows: tuple[int | None, ...], kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mini = Mini(windows=windows, blocks=73, gpu_prefixes=kept)
    told: list[Any] = []
    monkeypatch.setattr(mini.manager, "request_ended", lambda *how: told.append(how))
    asked = prompt(3, seed=1)
    name = mini.add(asked, count=40)
    mini.run()
    mini.step()
    ((keys, together, rests),) = told
    first, others = windows.index(None), {*range(len(windows))} - {windows.index(None)}
    made_of = hashes(asked + mini.answers[name])[:5]
    prefix = [mini.view.key(one, first) for one in made_of]
    assert together and [key for key in keys if key not in rests] == prefix
    assert rests == {
        mini.view.key(h, other): mini.view.key(h, first) for h in made_of for other in others
    }
    assert all(keys.index(key) > keys.index(on) for key, on in rests.items())


def test_blocks_without_a_key_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    mini = Mini(windows=(None, 40), blocks=73)
    told: list[Any] = []
    monkeypatch.setattr(mini.manager, "request_ended", lambda *how: told.append(how))
    (made_of,) = hashes(prompt(1, seed=1, tail=0))
    full, window = (mini.view.key(made_of, group) for group in (0, 1))
    mini.tier._recency.computes("a request", [None, window, full])
    mini.tier._recency.ended(["a request"])
    assert told == [([full, window], False, {window: full})]


def test_nothing_that_was_noted_is_left_once_vllm_has_forgotten_its_blocks() -> None:
    mini, asked = Mini(), prompt(3, seed=1)
    recency = mini.tier._recency
    mini.only_in_cpu(asked)
    for _ in range(2):
        mini.add(asked, count=1)
        mini.run()
    assert recency.keys and recency._at_once and recency._hit
    assert mini.scheduler.reset_prefix_cache()
    assert not (recency.used or recency.keys or recency._at_once or recency._hit)


def test_what_is_in_no_known_order_has_no_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a block of a window that no block of full attention ends with."""
    mini, shares = Mini(windows=(None, 40), blocks=73, gpu_prefixes="auto"), list[Any]()
    monkeypatch.setattr(PrefixShare, "ended", lambda self, keys, *how: shares.append(keys) or ())
    made_of = hashes(prompt(2, seed=1, tail=0))
    full, *windows = (mini.view.key(made_of[at], group) for at, group in ((0, 0), (0, 1), (1, 1)))
    for name, window in zip("ab", windows):
        mini.tier._recency.computes(name, [window, full])
        mini.tier._recency.ended([name])
    assert shares == [[full]]


def test_windows_alone_rest_on_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mini = Mini(windows=(40, 24), blocks=73)
    told: list[Any] = []
    monkeypatch.setattr(mini.manager, "request_ended", lambda *how: told.append(how[1:]))
    mini.add(prompt(3, seed=1), count=40)
    mini.run()
    mini.step()
    assert told == [(True, None)]
    mini.tier._recency.computes("a request", [mini.view.key(one, 0) for one in hashes([5] * 99)])
    mini.tier._recency.ended(["a request"])
    assert len(told) == 1, "what is stored at once is together as it is"


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_window_whose_prefix_is_gone_leaves_next(eviction: str) -> None:
    mini = Mini(eviction=eviction, windows=(None, 40), blocks=49, num_slots=16, store="eager")
    tier, rng, windows = mini.manager, random.Random(1), 0
    for _ in range(60):
        asked = prompt(2, seed=rng.randrange(3))
        asked += prompt(rng.randrange(1, 4), seed=100 + rng.randrange(6))
        mini.add(asked, count=rng.randrange(2, 40))
        mini.run()
        mini.settle()
        mini.step()
        due = {tier._key_of[slot] for slot in tier._prefixes._due}
        prefixes = {mini.view.key(key[:-4], 1): key for key in tier._slot_of if not key[-1]}
        others = {key for key in tier._slot_of if key[-1]}
        assert others - due <= prefixes.keys()
        windows += len(others)
    assert windows and tier.stats.evicted


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_what_one_request_has_left_of_a_prefix_leaves_from_its_tail(eviction: str) -> None:
    """Its head is used again, and by others; its answer was stored a block at a time."""
    mini = Mini(eviction=eviction, num_slots=20, limits={"max_num_batched_tokens": 64})
    asked = prompt(4, seed=1)
    name = mini.add(asked, count=4 * BLOCK)
    mini.run()
    mini.step()
    keys = [mini.view.key(h, 0) for h in hashes(asked + mini.answers[name])]
    assert len(keys) == 8 and all(map(mini.manager.holds, keys))
    for seed in range(2, 7):
        mini.add(asked[: 2 * BLOCK] + prompt(3, seed=seed), count=2)
        mini.run()
        mini.settle()
        mini.step()
        held = [mini.manager.holds(key) for key in keys]
        assert held == sorted(held, reverse=True), held
    assert not held[-1]
