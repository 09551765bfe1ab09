"""Requests that ask for it, and answers if nobody wants them, leave nothing in the tier."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import BLOCK, Mini
from scheduler_half.parts import MAX_TOKENS, make_request
from scheduler_half.scenarios import nothing_held, prompt

from kvoffload_patch.config import STORES
from kvoffload_patch.integration.engine.blocks import store_choice
from kvoffload_patch.integration.engine.blocks.store_choice import (
    ARGUMENT,
    StoreChoice,
    stores,
)


def request(arguments: Any) -> Any:
    return SimpleNamespace(request_id="r1", sampling_params=SimpleNamespace(extra_args=arguments))


@pytest.mark.parametrize("value", [0, 0.0, False, "0", "false", "Off", " no "])
def test_a_request_can_opt_out(value: Any) -> None:
    assert not stores(request({ARGUMENT: value}))


@pytest.mark.parametrize("value", [1, 0.5, True, "1", " On ", "true", None])
def test_a_request_can_say_that_it_stores(value: Any) -> None:
    assert stores(request({ARGUMENT: value}))


@pytest.mark.parametrize("value", ["", "whatever", [], [1], {"a": 0}])
def test_what_is_not_understood_opts_out_and_is_said_once(
    value: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_choice._Unknown, "told", False)
    assert not any(stores(request({ARGUMENT: value})) for _ in range(3))
    [record] = caplog.records
    assert record.levelname == "WARNING" and f"of request r1, found {value!r}" in record.message


def test_a_request_without_arguments_or_without_sampling_stores() -> None:
    assert stores(request(None)) and stores(request({})) and stores(request({"another": 0}))
    assert stores(SimpleNamespace(sampling_params=None))


@pytest.mark.parametrize("store", STORES)
def test_a_turn_of_a_session_may_opt_out_though_the_one_before_has_not(store: str) -> None:
    mini = Mini(store=store)
    name = mini.add(prompt(4, seed=1), count=1, resumable=True)
    mini.run()
    turn = prompt(1, seed=2)
    mini.scheduler.add_request(
        make_request(name, turn, 2 * BLOCK, resumable=True, extra_args={ARGUMENT: 0})
    )
    mini.run()
    mini.abort(name)
    lose_all(mini)
    assert mini.manager.stats.not_stored["opted_out"] == 3  # one of its prompt, two of its answer
    assert held(mini, [*prompt(4, seed=1), 7]) == 4


def asked(mini: Mini, tokens: list[int], count: int, opts_out: bool = False) -> str:
    name = mini.add(tokens, count)
    mini.scheduler.requests[name].sampling_params.extra_args = {ARGUMENT: 0} if opts_out else None
    mini.run()
    return name


def lose_all(mini: Mini) -> None:
    """Other requests take the whole GPU, so that all that is stored late is stored."""
    for seed in range(50, 56):
        asked(mini, prompt(5, seed=seed), count=1)
    mini.settle()


def held(mini: Mini, tokens: list[int]) -> int:
    """Blocks of these that the tier and the GPU have."""
    name = asked(mini, tokens, count=1, opts_out=True)
    return mini.hits[name] // BLOCK


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("store", STORES)
def test_nothing_of_a_request_that_opts_out_is_stored(store: str, in_flight: int) -> None:
    mini = Mini(store=store, in_flight=in_flight)
    private, other = prompt(4, seed=1), prompt(4, seed=2)
    asked(mini, private, count=2 * BLOCK, opts_out=True)
    assert mini.manager.stats.not_stored["opted_out"] >= 4
    asked(mini, other, count=1)
    lose_all(mini)
    assert held(mini, [*private, 7]) == 0 and held(mini, [*other, 7]) == 4
    mini.check()


@pytest.mark.parametrize("store", STORES)
def test_a_request_that_opts_out_does_not_store_what_it_hits_either(store: str) -> None:
    mini = Mini(store=store)
    private = prompt(4, seed=1)
    for _ in range(3):
        asked(mini, [*private, 7], count=1, opts_out=True)
    lose_all(mini)
    assert held(mini, [*private, 7]) == 0
    mini.check()


@pytest.mark.parametrize("store", STORES)
def test_what_others_hit_of_a_request_that_opts_out_is_stored_for_them(store: str) -> None:
    mini = Mini(store=store)
    shared = prompt(4, seed=1)
    asked(mini, [*shared, 7], count=1, opts_out=True)
    name = asked(mini, [*shared, 8], count=1)
    assert mini.hits[name] == 4 * BLOCK
    lose_all(mini)
    assert held(mini, [*shared, 7]) == 4
    mini.check()


@pytest.mark.parametrize("store", STORES)
def test_answers_that_the_next_turn_hits_are_stored_with_it(store: str) -> None:
    """What that turn computes behind them is worth nothing without them."""
    mini = Mini(store=store, store_decode=False)
    name = asked(mini, prompt(2, seed=1), count=3 * BLOCK + 1)
    turn = [*prompt(2, seed=1), *mini.answers[name], *prompt(1, seed=2)]
    name = asked(mini, turn, count=1)
    assert mini.hits[name] == 5 * BLOCK
    lose_all(mini)
    assert held(mini, turn) == 6
    mini.check()


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("decode", [True, False])
def test_blocks_of_answers_are_stored_unless_that_is_off(
    decode: bool, store: str, in_flight: int
) -> None:
    mini = Mini(store=store, store_decode=decode, in_flight=in_flight)
    tokens = prompt(3, seed=1)[: 3 * BLOCK - 2]  # the prompt's last block ends with the answer
    name = asked(mini, tokens, count=3 * BLOCK)
    whole = [*tokens, *mini.answers[name]]
    lose_all(mini)
    assert held(mini, whole) == (5 if decode else 2)
    assert bool(mini.manager.stats.not_stored["decode"]) != decode
    mini.check()


def test_blocks_of_answers_are_stored_though_events_are_told_of_them_as_well() -> None:
    """Both are told of what is cached, of which answers matter only where they are not stored."""
    mini = Mini(store="eager", events=True)
    asked(mini, prompt(1, seed=1), count=2 * BLOCK + 1)
    mini.settle()
    assert mini.manager.stats.stored == 3 and not mini.breaker.detached


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("how", ["as it is", "opts out", "decode is off"])
def test_a_block_that_vllm_caches_after_the_last_step_is_stored_as_the_others_are(
    how: str, store: str
) -> None:
    """The asynchronous scheduler does so as it takes in the output; no step comes after it."""
    mini = Mini(store=store, store_decode=how != "decode is off", in_flight=2)
    tokens = prompt(2, seed=1)[: 2 * BLOCK - 2]
    name = mini.add(tokens, count=4 * BLOCK - len(tokens) + 1)
    request = mini.scheduler.requests[name]
    request.sampling_params.extra_args = {ARGUMENT: 0} if how == "opts out" else None
    keys = []
    while mini.scheduler.has_unfinished_requests() or mini.queue:
        mini.step()
        keys += [block.block_hash for _, found in mini.tier.cached for block in found]
    assert len(keys) == 1, "this test shows nothing"
    lose_all(mini)
    assert mini.manager.holds(keys[0]) == (how == "as it is")
    mini.check()


@pytest.mark.parametrize("store", STORES)
def test_prompts_are_stored_from_blocks_that_had_answers(store: str) -> None:
    mini = Mini(store=store, store_decode=False)
    for seed in range(20, 24):
        asked(mini, prompt(1, seed=seed), count=6 * BLOCK)
    prompts = [prompt(5, seed=seed) for seed in range(4)]
    for tokens in prompts:
        asked(mini, tokens, count=1)
    lose_all(mini)
    assert [held(mini, tokens) for tokens in prompts] == [5] * 4
    mini.check()


def test_a_block_that_had_an_answer_before_a_reset_is_stored_as_a_prompts() -> None:
    choice = (mini := Mini(store_decode=False)).tier.choice
    asks = SimpleNamespace(request_id="r1", num_prompt_tokens=0, sampling_params=None)
    blocks = [SimpleNamespace(block_id=3, _block_hash="key")]
    for reset in (False, True):
        choice.note_answers(asks, blocks, 0, 1, BLOCK)
        if reset:
            assert mini.scheduler.reset_prefix_cache()
        assert choice.computed([(asks, blocks)], {"r1": 1}) == ({"key": 3} if reset else {})


@pytest.mark.parametrize("later", ["as it is", "paused"])
def test_keys_of_blocks_that_no_step_computes_leave_vllms_cache(later: str) -> None:
    """Priorities let vLLM preempt a request that the same step has scheduled already."""
    mini = Mini(blocks=16, policy="priority", limits={"long_prefill_token_threshold": 48})
    mini.scheduler.adaptive_long_prefill_threshold = False
    tokens = prompt(12, seed=1, tail=8)
    mini.add(prompt(0, seed=3, tail=2), count=12)
    low = mini.add(tokens, count=2, priority=5)
    mini.step()
    mini.add(prompt(1, seed=2, tail=15), count=8)
    if later == "paused":
        mini.tier.pause()
    while mini.device.resumed == 0 and mini.scheduler.has_unfinished_requests():
        mini.step()
    assert mini.device.resumed == 1, "this test shows nothing"
    mini.run()
    mini.check()
    again = mini.add(tokens, count=2)
    mini.run()
    mini.check()
    assert mini.hits[low] == 0 and mini.hits[again] > 0
    nothing_held(mini)


@pytest.mark.parametrize("filled", [True, False])
def test_what_a_connector_fills_keeps_its_keys_and_is_not_stored_by_them(filled: bool) -> None:
    """Its request is in no step, as if preempted: whether all of it has arrived is not known."""
    mini = Mini(blocks=49, store="lazy", weighs=False)
    asked(mini, prompt(3, seed=1), count=1)
    keys = [mini.view.key(h, 0) for h in make_request("r", prompt(3, seed=1), 1).block_hashes]
    blocks = [mini.view.gpu_lookup()(key) for key in keys]
    assert all(blocks) and not any(map(mini.manager.holds, keys))
    waits = SimpleNamespace(request_id="r", num_computed_tokens=3 * BLOCK)
    if filled:
        assert mini.tier.choice.computed([(waits, blocks)], {}) == {}
        assert mini.view.keys_in(blocks) == keys
    lose_all(mini)
    lose_all(mini)
    assert [mini.manager.holds(key) for key in keys] == [not filled] * 3


@pytest.mark.parametrize("blocks", [21, 22])
@pytest.mark.parametrize("store", STORES)
def test_blocks_that_another_request_fills_in_the_step_of_a_preemption_are_stored(
    store: str, blocks: int
) -> None:
    """They were taken from a request that the same step had scheduled already."""
    mini = Mini(
        blocks=blocks, store=store, policy="priority", limits={"long_prefill_token_threshold": 48}
    )
    mini.scheduler.adaptive_long_prefill_threshold = False
    mini.add(prompt(0, seed=3, tail=2), count=14)  # prompts come in parts while others decode
    mini.step()
    prompts = [prompt(15, seed=1), prompt(12, seed=2)]
    for tokens, priority in zip(prompts, (5, 0)):
        mini.add(tokens, count=1, priority=priority)
        mini.step()
    mini.run()
    assert mini.device.resumed == 1, "this test shows nothing"
    lose_all(mini)
    for tokens in prompts:
        made_of = make_request("asked", tokens, 1).block_hashes
        assert all(mini.manager.holds(mini.view.key(one, 0)) for one in made_of)
    mini.check()


def test_what_several_requests_compute_in_a_step_is_stored() -> None:
    mini = Mini(store="eager")
    prompts = [prompt(3, seed=seed) for seed in range(3)]
    for tokens in prompts:
        mini.add(tokens, count=2)
    mini.step()
    assert len(mini.scheduler.running) == 3, "this test shows nothing"
    mini.run()
    mini.settle()
    assert mini.manager.stats.stored == 9


@pytest.mark.parametrize("store", STORES)
def test_a_prompt_is_stored_that_is_computed_in_the_step_of_anothers_answer(store: str) -> None:
    mini = Mini(store=store, store_decode=False)
    mini.add(prompt(1, seed=1)[: BLOCK - 1], count=2)
    mini.step()
    tokens = prompt(3, seed=2)
    mini.add(tokens, count=1)
    mini.run()
    assert mini.manager.stats.not_stored["decode"] == 1
    lose_all(mini)
    assert held(mini, [*tokens, 7]) == 3
    mini.check()


def choice_of(mini: Mini, running: int = 4) -> StoreChoice:
    """A choice made of a scheduler as it is now, with so many running requests."""
    mini.scheduler.running = [object()] * running
    return StoreChoice(mini.view, mini.manager, mini.tier._front, mini.tier._recency, decode=True)


def test_few_blocks_of_running_requests_can_wait() -> None:
    choice = choice_of(Mini(blocks=101))
    assert choice.can_wait(0)
    assert choice.can_wait(4)
    assert not choice.can_wait(5), "a prompt's blocks"
    assert choice_of(Mini(blocks=101), running=1).can_wait(1)


def test_nothing_waits_where_no_step_is_sure_to_come_or_a_connector_is() -> None:
    mini = Mini(blocks=101)
    assert not choice_of(mini, running=0).can_wait(0)
    mini.scheduler.connector = object()
    assert not choice_of(mini).can_wait(1)


def test_nothing_waits_where_free_blocks_are_about_to_be_handed_out() -> None:
    mini = Mini(blocks=101)
    choice, view = choice_of(mini), mini.view
    ahead = max(2 * view.blocks_for(MAX_TOKENS), 101 // 8)
    mini.pool.get_new_blocks(view.num_free_blocks() - ahead - 1)
    assert choice.can_wait(4)
    mini.pool.get_new_blocks(1)
    assert not choice.can_wait(4)


def test_blocks_that_lose_their_memory_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    mini = Mini(blocks=101)
    monkeypatch.setattr(mini.view.adapter, "elastic", True)
    assert not choice_of(mini).can_wait(1)


@pytest.mark.parametrize(("windows", "waits"), [((None,), True), ((None, 64), False)])
def test_only_blocks_of_full_attention_wait(windows: tuple[int | None, ...], waits: bool) -> None:
    assert choice_of(Mini(blocks=101, windows=windows)).can_wait(1) is waits
