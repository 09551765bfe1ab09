"""The GPU keeps heads of prefixes that come back in turns, and whole ones where that finds more."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import Mini
from scheduler_half import parts
from scheduler_half.scenarios import nothing_held, prompt

from kvoffload_patch.tier.prefix_share import PrefixShare

CHATS, LENGTH, GPU = 12, 8, 61  # blocks of a chat and of the GPU, of which one is the null block
ASKED = prompt(LENGTH, seed=77)


def rounds(mini: Mini, times: int, chats: int = CHATS) -> list[int]:
    """Blocks of each prompt that the GPU had when it was asked, from its head on."""
    said = [prompt(LENGTH, seed=number) for number in range(chats)]
    found = []
    for _ in range(times):
        for tokens in said:
            on_gpu = [block is not None for block in blocks_of(mini, tokens)]
            found.append([*on_gpu, False].index(False))
            ask(mini, [*tokens, 1, 2, 3])
    mini.check()
    return found


def ask_all(mini: Mini, times: int, chats: int = CHATS) -> None:
    """Ask for each prompt in turn."""
    for number in [*range(chats)] * times:
        ask(mini, [*prompt(LENGTH, seed=number), 1, 2, 3])


def ask(mini: Mini, tokens: list[int]) -> None:
    """A request comes, ends, and is told to have ended."""
    mini.add(tokens, count=1)
    mini.run()
    mini.settle()
    mini.step()


def blocks_of(mini: Mini, tokens: list[int]) -> list[Any]:
    """The GPU's block of each full block of a prompt, None where it has none."""
    find, key = mini.view.gpu_lookup(), mini.view.key
    return [find(key(made, 0)) for made in parts.make_request("asked", tokens, 1).block_hashes]


def queue(mini: Mini) -> list[int]:
    """The free blocks, the next to be handed out first."""
    return [block.block_id for block in mini.pool.free_block_queue.get_all_free_blocks()]


def keeps_half(mini: Mini) -> None:
    """From now on, whatever finds more."""
    heads = mini.tier._recency.heads
    assert heads is not None
    heads.prefix_share.share, heads.prefix_share._due = 0.5, 1 << 30


def change(mini: Mini, kept: str) -> None:
    """By the command `set`, between two steps."""
    one = mini.ask("set", gpu_prefixes=kept)
    mini.begin_step()
    mini.end_step()
    assert one.done.is_set() and not one.error


def tail_of(mini: Mini, tokens: list[int]) -> list[int]:
    """The blocks of the later half of a prompt, the last one first."""
    return [block.block_id for block in blocks_of(mini, tokens)[: LENGTH // 2 - 1 : -1]]


def test_heads_stay_where_prefixes_come_back_in_turns() -> None:
    whole = Mini(blocks=GPU, gpu_prefixes="whole")
    assert not any(rounds(whole, 4)) and whole.tier._recency.heads is None
    mini = Mini(blocks=GPU)
    last = rounds(mini, 4)[-CHATS:]
    assert mini.tier.gpu_share < 0.7 and sum(last) > CHATS * LENGTH / 4
    nothing_held(mini)


@pytest.mark.parametrize("windows", [(None, 40), (40, None), (None, "state")])
def test_heads_of_full_attention_stay_beside_other_groups(windows: tuple[Any, ...]) -> None:
    """Of windows and states a hit needs the last ones alone."""
    loaded = {}
    for kept in ("whole", "auto"):
        mini = Mini(blocks=GPU + 24, windows=windows, gpu_prefixes=kept)
        ask_all(mini, 6)
        before = mini.manager.stats.loaded
        ask_all(mini, 1)
        loaded[kept] = mini.manager.stats.loaded - before
        mini.check()
        nothing_held(mini)
    assert loaded["auto"] < 0.8 * loaded["whole"]


def test_windows_are_handed_out_with_the_tail_that_they_end_with() -> None:
    mini = Mini(blocks=GPU, windows=(None, 40), store="eager")
    ask_all(mini, 1, chats=6)
    keeps_half(mini)
    ask(mini, ASKED)
    find, key = mini.view.gpu_lookup(), mini.view.key
    hashes = parts.make_request("asked", ASKED, 1).block_hashes
    held = {n: [find(key(made, n)) for made in hashes] for n in (0, 1)}
    given = {block.block_id for n in held for block in held[n][LENGTH // 2 :] if block}
    assert len(given) > LENGTH // 2 and {*queue(mini)[: len(given)]} == given


@pytest.mark.parametrize("windows", [(None,), (None, 40), (40, None)])
def test_what_is_hit_is_weighed_in_blocks_of_full_attention(
    windows: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of windows are left with them, and say nothing of how much of a prefix is there."""
    mini, told = Mini(blocks=GPU, windows=windows, store="eager"), list[tuple[int, int, int]]()
    ended = PrefixShare.ended

    def noted(self: PrefixShare, keys: Any, hit: Any, *about: Any) -> Any:
        told.append((len(keys), hit.blocks, hit.on_gpu))
        return ended(self, keys, hit, *about)

    monkeypatch.setattr(PrefixShare, "ended", noted)
    for _ in range(2):
        ask(mini, ASKED)
    mini.pool.free_blocks(mini.pool.get_new_blocks(mini.pool.get_num_free_blocks()))
    ask(mini, ASKED)
    assert told == [(LENGTH, 0, 0), (LENGTH, LENGTH, LENGTH), (LENGTH, LENGTH, 0)]


@pytest.mark.parametrize("windows", [(40,), ("state",)])
def test_no_heads_are_kept_without_full_attention(windows: tuple[Any, ...]) -> None:
    mini = Mini(blocks=GPU, windows=windows)
    ask_all(mini, 4)
    assert mini.tier._recency.heads is None and mini.tier.gpu_share == 1


def test_no_heads_are_kept_where_blocks_are_handed_out_in_an_order_that_is_not_known() -> None:
    mini = Mini(blocks=GPU, gpu_prefixes="whole")
    mini.view.adapter.in_order = False
    change(mini, "auto")
    ask_all(mini, 4)
    assert mini.tier.gpu_share == 1 and not mini.breaker.detached


def test_what_the_gpu_keeps_changes_while_it_serves() -> None:
    mini = Mini(blocks=GPU, gpu_prefixes="whole")
    rounds(mini, 4)
    change(mini, "auto")
    assert sum(rounds(mini, 5)[-CHATS:]) > CHATS * LENGTH / 4 and mini.tier.gpu_share < 0.7
    change(mini, "auto")
    assert mini.tier.gpu_share < 0.7, "it is so already, and goes on with what it has found"
    change(mini, "whole")
    assert not any(rounds(mini, 2)[-CHATS:]) and mini.tier.gpu_share == 1
    nothing_held(mini)


def test_what_comes_back_before_the_gpu_loses_it_is_kept_as_a_whole() -> None:
    mini = Mini(blocks=GPU)
    assert all(found == LENGTH for found in rounds(mini, 12, chats=5)[5:])
    assert mini.tier.gpu_share == 1


def test_a_tail_is_handed_out_first_its_end_before_all() -> None:
    mini = Mini(blocks=GPU, store="eager")
    rounds(mini, 1, chats=9)
    keeps_half(mini)
    ask(mini, ASKED)
    order, tail = queue(mini), tail_of(mini, ASKED)
    assert order[: len(tail)] == tail
    assert len(order) == len({*order}) == mini.pool.get_num_free_blocks() == GPU - 1
    kept = mini.pool.get_new_blocks(1)
    assert not mini.scheduler.reset_prefix_cache()
    assert mini.tier.gpu_share == 0.5, "vLLM has refused to forget"
    mini.pool.free_blocks(kept)
    assert mini.scheduler.reset_prefix_cache()
    assert mini.tier.gpu_share == 1


def test_a_tail_is_handed_out_first_beside_blocks_in_use_that_hold_no_prefix() -> None:
    """Those of loads under way, and the last of each request."""
    mini = Mini(blocks=GPU, store="eager")
    used = mini.pool.get_new_blocks(GPU // 4)
    rounds(mini, 1, chats=9)
    keeps_half(mini)
    ask(mini, ASKED)
    tail = tail_of(mini, ASKED)
    assert queue(mini)[: len(tail)] == tail
    mini.pool.free_blocks(used)
    nothing_held(mini)


@pytest.mark.parametrize(
    ("why", "seed"),
    [("not stored", 77), ("lazy", 0), ("paused", 8), ("blank", 77)],  # 0: loaded, 8: on the GPU
)
def test_nothing_is_handed_out_early_that_is_needed(why: str, seed: int) -> None:
    asked, before = prompt(LENGTH, seed), 3 if why == "blank" else 9
    slots, store = 4 if why == "not stored" else 400, "lazy" if why == "lazy" else "eager"
    mini = Mini(blocks=GPU, num_slots=slots, store=store)
    rounds(mini, 1, chats=before)
    keeps_half(mini)
    if why == "paused":
        mini.add(asked, count=3)
        mini.step()
        mini.tier.pause()
        mini.run()
        mini.step()
    else:
        ask(mini, asked)
    assert queue(mini)[-LENGTH : -LENGTH // 2] == tail_of(mini, asked)


@pytest.mark.parametrize("windows", [(None,), (None, 40)])
def test_tails_of_many_requests_that_end_in_a_step_are_handed_out(windows: tuple[Any, ...]) -> None:
    """Each leaves blocks that are not full, which newer releases of vLLM hand out first."""
    many = {"max_num_seqs": 24, "max_num_batched_tokens": 4096}
    mini = Mini(blocks=5 * GPU, windows=windows, store="eager", num_slots=1000, limits=many)
    ask_all(mini, 1, chats=5 * GPU // LENGTH)
    keeps_half(mini)
    names = [mini.add([*prompt(4, seed=100 + n), 1, 2, 3], count=200) for n in range(24)]
    for _ in range(4):
        mini.step()
        mini.settle()
    assert len(mini.scheduler.running) == len(names)
    moved: list[Any] = []
    mini.view.adapter.hand_out_first = moved.extend
    for name in names:
        mini.abort(name)
    mini.add(ASKED, count=1)
    mini.step()
    assert len(moved) >= 2 * len(names)


def test_a_tail_that_another_request_uses_stays() -> None:
    mini = Mini(blocks=GPU, store="eager")
    rounds(mini, 1, chats=9)
    keeps_half(mini)
    mini.add(ASKED, count=40)
    mini.step()
    mini.settle()
    mini.add(ASKED, count=1)
    for _ in range(4):
        mini.step()
    assert {block.ref_cnt for block in blocks_of(mini, ASKED)} == {1}
    assert not mini.breaker.detached
    mini.run()
    mini.check()
    nothing_held(mini)


def test_no_block_is_lost_where_one_cannot_be_moved() -> None:
    mini = Mini(blocks=GPU)
    rounds(mini, 1, chats=9)
    before, (used,) = queue(mini), mini.pool.get_new_blocks(1)
    free = mini.pool.free_block_queue.get_all_free_blocks()
    with pytest.raises((RuntimeError, AssertionError, AttributeError)):
        mini.view.adapter.hand_out_first([free[-1], used, free[-2]])
    mini.pool.free_blocks([used])
    assert {*queue(mini)} == {*before} and len(queue(mini)) == mini.pool.get_num_free_blocks()
    nothing_held(mini)
