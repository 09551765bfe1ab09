"""Greedy answers of a real engine with the tier are those of plain vLLM, and hits happen."""

from __future__ import annotations

import pytest
from engine import engines, release
from engine.report import assert_same

PARKED = {"KVOFFLOAD_LOAD_MODE": "parked"}
MODES = {
    # Loads and stores happen within the step on the CPU device.
    "inline": {"tier": {}},
    # Copies as late as the plans allow: a wait that a plan lacks shows as a wrong token.
    "inline-late": {"tier": {}, "late": 3},
    "parked-late": {"tier": PARKED, "late": 3},
}
LATE = [
    pytest.param(mode, id=name, marks=[pytest.mark.matrix] if "late" in mode else [])
    for name, mode in MODES.items()
]


def full(tokens: int) -> int:
    """Tokens in full blocks."""
    return tokens // release.block_size() * release.block_size()


# A prompt of 500 tokens that comes again; its last token is always computed.
AGAIN = full(499)


@pytest.fixture(scope="module", params=LATE)
def tiered(request, real):
    return real.on(engines.SHARED, **request.param)


@pytest.fixture(scope="module")
def parks(tiered):
    return "loads parked" in tiered.log


@pytest.mark.matrix
def test_answers_depend_on_the_first_block(plain):
    answers = [tuple(a) for a in plain["sensitivity"]["tokens"]]
    assert len(set(answers)) == len(answers), "a lost KV cache would go unnoticed"


def test_an_evicted_prefix_returns(plain, tiered):
    off, on = plain["conversations"], tiered["conversations"]
    assert_same(on, off)
    assert off["cached"] == 0, "the GPU cache holds the prefixes, so the test shows nothing"
    assert on["cached"] == engines.evicted_tokens()
    # A request that waits, parked, can find blocks on the GPU that nobody needed meanwhile. In each
    # mode the first load is parked, to be compared.
    loaded = on["tier"]["loaded"] * release.block_size()
    assert 0.9 * engines.evicted_tokens() <= loaded <= engines.evicted_tokens()
    assert on["tier"]["dropped"] == 0


@pytest.mark.matrix
def test_vllm_counts_what_came_back_as_external_hits(real):
    if not release.counts_external_hits():
        pytest.skip(f"vLLM {release.version()} has no counter of hits beyond its own cache")
    # Not parked: 0.17 to 0.27 drop the counts of a step without outputs, and requests that were
    # preempted are counted apart.
    talks = real.on(engines.SHARED, **MODES["inline-late"])["conversations"]
    assert talks["loaded"] == talks["tier"]["loaded"] * release.block_size() > 0


def test_two_requests_for_the_same_evicted_prefix_load_it_once(plain, tiered):
    off, on = plain["twins"], tiered["twins"]
    assert_same(on, off)
    assert on["cached"] == [640, 640]
    assert on["blocks_loaded"] == 640 // release.block_size()


def test_prompts_answered_with_one_token_are_stored_and_hit(plain, tiered):
    off, on = plain["one_token"], tiered["one_token"]
    assert_same(on, off)
    assert on["cached"] == [0] * 8
    assert on["cached_again"] == [384] * 8 != off["cached_again"]


def test_a_prompt_of_whole_blocks_has_its_last_one_loaded_too(plain, tiered, parks):
    off, on = plain["whole_blocks"], tiered["whole_blocks"]
    assert_same(on, off)
    size = release.block_size()
    assert on["cached"] == [0] * 3 + [512 - size] * 6
    blocks, last = 512 // size, 0 if parks else 1
    assert on["blocks_loaded"] == [0] * 3 + [blocks - 1 + last] * 3 + [last] * 3


def test_preempted_requests_answer_the_same(plain, tiered):
    off, on = plain["preemption"], tiered["preemption"]
    assert off["preemptions"] > 0 and on["preemptions"] > 0
    assert_same(on, off)


@pytest.mark.parametrize("mode", [{}, {"late": 3}])
def test_a_preempted_request_loads_its_full_blocks_and_computes_the_rest(real, mode):
    """vLLM's own connectors to CPU memory need a GPU, also with 0.32.0: they cannot play here."""
    off, on = (run["under_pressure"] for run in (
        real.off(["under_pressure"]), real.on(["under_pressure"], **{"tier": {}, **mode}),
    ))  # fmt: skip
    assert on["times_the_cache"] >= 3 and min(off["preemptions"], on["preemptions"]) > 0
    assert_same(on, off)
    assert on["loaded_tokens"] > 0 and off["loaded_tokens"] == 0
    # Each computes its partly filled block again; every full one is stored, or on the GPU.
    most = on["preemptions"] * release.block_size()
    assert on["recomputed"] < most < off["recomputed"]


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("model", marks=pytest.mark.matrix),
        pytest.param("windows", marks=pytest.mark.features),
    ],
)
def test_the_gpu_keeps_heads_of_prompts_that_come_back_in_turns(real, model):
    # Small: up to 0.22 a prompt's last block, which is not full, stays for as long as a head.
    block = min(32, release.block_size())
    engine = {"block_size": block, "num_gpu_blocks_override": 32 * release.BLOCK // block}
    engine |= {"model": getattr(real, model), "max_model_len": 1024}
    heads = {"KVOFFLOAD_GPU_PREFIXES": "auto"}
    off, on = real.off(["in_turns"], engine), real.on(["in_turns"], engine, heads, late=3)
    off, on = off["in_turns"], on["in_turns"]
    assert_same(on, off)
    if release.version().startswith("0.9."):
        pytest.skip("up to 0.9.2 the order of vLLM's queue is left alone")
    assert on["share"] < 0.8 and 0 < on["loaded"][-1] < 0.9 * max(on["loaded"]), on["loaded"]


def test_cache_salts_are_kept_apart(plain, tiered):
    off, on = plain["salts"], tiered["salts"]
    assert_same(on, off)
    assert on["cached"] == [0, 0, AGAIN, AGAIN]


def test_nothing_stale_is_served_after_a_reset(plain, tiered):
    off, on = plain["reset"], tiered["reset"]
    assert_same(on, off)
    assert off["tokens"][0] != off["tokens"][2], "the new weights answer the same"
    # First turn after each reset: nothing; second: everything comes from the CPU.
    assert on["cached"] == [0, AGAIN] * 3


@pytest.fixture(scope="module")
def parked(real):
    return real.on(engines.SHARED, **MODES["parked-late"])


@pytest.mark.matrix
def test_abort_while_loading_loses_nothing(plain, parked):
    off, on = plain["abort_while_loading"], parked["abort_while_loading"]
    assert on["parked"], "the request was not parked, so the test shows nothing"
    assert_same(on, off)
    assert on["cached"] == [AGAIN]
    assert on["blocks_lost"] == 0 and on["slots_pinned"] == 0


@pytest.mark.matrix
def test_reset_while_loading_recomputes_with_the_new_weights(plain, parked):
    off, on = plain["reset_while_loading"], parked["reset_while_loading"]
    assert on["parked"] and on["reset"] is not False  # None: up to 0.11 vLLM does not say
    assert_same(on, off, "fresh")
    assert on["tokens"] == on["fresh"]
    assert on["cached"] == [0]


def test_a_full_tier_evicts_and_stays_right(plain, real):
    run = real.on(["conversations"], tier={"KVOFFLOAD_CPU_GIB": "0.012"})  # 3072 tokens
    on = run["conversations"]
    assert on["tokens"] == plain["conversations"]["tokens"]
    assert on["tier"]["evicted"] > 0 and on["tier"]["dropped"] == 0


def test_a_tier_of_one_block_hits(plain, real):
    gib = 0.0005 * release.block_size() / release.BLOCK
    run = real.on(["conversations", "twins"], tier={"KVOFFLOAD_CPU_GIB": f"{gib:.7f}"})
    assert "CPU tier of 1 blocks" in run.log
    assert run["conversations"]["tokens"] == plain["conversations"]["tokens"]
    assert run["twins"]["tokens"] == plain["twins"]["tokens"]
    assert run["conversations"]["tier"]["stored"] > 0


def test_what_a_slow_bus_brings_later_than_it_is_computed_is_computed(real):
    off = real.off(["slow_bus"])["slow_bus"]
    on = real.on(["slow_bus"], tier={"KVOFFLOAD_RECOMPUTE": "auto"})["slow_bus"]
    assert on["tokens"] == off["tokens"]
    assert on["ms_per_token"] > 0, "no step has said what a token takes"
    _, (fast, none), (slow, computed) = on["moved"]
    assert none == 0 and fast == slow > 0 and computed == 3 * full(419)
