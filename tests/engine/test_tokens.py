"""Greedy answers of a real engine with the tier are those of plain vLLM, and hits happen."""

from __future__ import annotations

import pytest
from engine import engines

PARKED = {"KVOFFLOAD_LOAD_MODE": "parked"}
MODES = {
    # The tier as a user gets it; loads and stores happen within the step on the CPU device.
    "inline": {"tier": {}},
    # Copies as late as the plans allow: a wait that a plan lacks shows as a wrong token.
    "inline-late": {"tier": {}, "late": 3},
    "parked-late": {"tier": PARKED, "late": 3},
}


@pytest.fixture(scope="module", params=MODES, ids=list(MODES))
def tiered(request, real):
    return real.on(engines.SHARED, **MODES[request.param])


def test_answers_depend_on_the_first_block(plain):
    answers = [tuple(a) for a in plain["sensitivity"]["tokens"]]
    assert len(set(answers)) == len(answers), "a lost KV cache would go unnoticed"


def test_an_evicted_prefix_returns(plain, tiered):
    off, on = plain["conversations"], tiered["conversations"]
    assert on["tokens"] == off["tokens"]
    assert off["cached"] == 0, "the GPU cache holds the prefixes, so the test shows nothing"
    # Every full block of the turns before, but for the last token of a prompt: all there is.
    assert on["cached"] == on["loaded"] == 7680
    assert on["tier"]["loaded"] == 7680 // 128 and on["tier"]["dropped"] == 0


def test_two_requests_for_the_same_evicted_prefix_load_it_once(plain, tiered):
    off, on = plain["twins"], tiered["twins"]
    assert on["tokens"] == off["tokens"]
    assert on["cached"] == [640, 640] and on["blocks_loaded"] == 5


def test_prompts_answered_with_one_token_are_stored_and_hit(plain, tiered):
    off, on = plain["one_token"], tiered["one_token"]
    assert on["tokens"] == off["tokens"]
    assert on["cached"] == [0] * 8
    assert on["cached_again"] == [384] * 8 != off["cached_again"]


def test_preempted_requests_answer_the_same(plain, tiered):
    off, on = plain["preemption"], tiered["preemption"]
    assert off["preemptions"] > 0 and on["preemptions"] > 0
    assert on["tokens"] == off["tokens"]


def test_cache_salts_are_kept_apart(plain, tiered):
    off, on = plain["salts"], tiered["salts"]
    assert on["tokens"] == off["tokens"]
    assert on["cached"] == [0, 0, 384, 384]


def test_nothing_stale_is_served_after_a_reset(plain, tiered):
    off, on = plain["reset"], tiered["reset"]
    assert on["tokens"] == off["tokens"]
    assert off["tokens"][0] != off["tokens"][2], "the new weights answer the same"
    # First turn after each reset: nothing; second: everything comes from the CPU.
    assert on["cached"] == [0, 384] * 3


@pytest.fixture(scope="module")
def parked(real):
    return real.on(["abort_while_loading", "reset_while_loading"], tier=PARKED, late=3)


@pytest.fixture(scope="module")
def unparked(real):
    return real.off(["abort_while_loading", "reset_while_loading"])


def test_abort_while_loading_loses_nothing(unparked, parked):
    off, on = unparked["abort_while_loading"], parked["abort_while_loading"]
    assert on["parked"], "the request was not parked, so the test shows nothing"
    assert on["tokens"] == off["tokens"]
    assert on["cached"] == [384]
    assert on["blocks_lost"] == 0 and on["slots_pinned"] == 0


def test_reset_while_loading_recomputes_with_the_new_weights(unparked, parked):
    off, on = unparked["reset_while_loading"], parked["reset_while_loading"]
    assert on["parked"] and on["reset"]
    assert on["tokens"] == on["fresh"] == off["fresh"]
    assert on["cached"] == [0]


def test_a_full_tier_evicts_and_stays_right(plain, real):
    run = real.on(["conversations"], tier={"KVOFFLOAD_CPU_GIB": "0.012"})  # 24 blocks
    on = run["conversations"]
    assert on["tokens"] == plain["conversations"]["tokens"]
    assert on["tier"]["evicted"] > 0 and on["tier"]["dropped"] == 0


def test_a_tier_of_one_block_hits(plain, real):
    run = real.on(["conversations", "twins"], tier={"KVOFFLOAD_CPU_GIB": "0.0005"})
    assert "CPU tier of 1 blocks" in run.log
    assert run["conversations"]["tokens"] == plain["conversations"]["tokens"]
    assert run["twins"]["tokens"] == plain["twins"]["tokens"]
    assert run["conversations"]["tier"]["stored"] > 0
