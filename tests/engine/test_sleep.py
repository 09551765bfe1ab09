"""Sleep and other weights: what is kept through them answers as plain vLLM does, or is not kept."""

from __future__ import annotations

import pytest
from engine import plain as vllm
from engine import release

ASLEEP = {"enable_sleep_mode": True}
SWITCH = {"TEST_SLEEP": "1"}
TP = {"tensor_parallel_size": 2}
FORKED = {"TEST_FORK_WORKERS": "1"}
KEPT = ("level 1", "level 1, three times", "level 0", "other weights, level 1")
LOST = ("first", "other weights", "level 2", "reset")

pytestmark = pytest.mark.skipif(
    not release.resets_when_it_sleeps(), reason="up to 0.16 the front end resets the cache"
)


def found(prompts: int) -> int:
    """Tokens of so many prompts of 420 that can be found."""
    block = release.block_size()
    return prompts * (419 // block * block)


def check(on, off) -> None:
    assert on["tokens"] == off["tokens"]
    assert not any(off["cached"].values()), "plain vLLM found what it was to have lost"
    assert len({str(off["tokens"][name]) for name in ("first", "other weights", "level 2")}) == 3
    assert off["tokens"]["level 1"] == off["tokens"]["first"]


@pytest.mark.parametrize(
    ("engine", "tier", "late", "env"),
    [
        pytest.param({}, {}, 0, {}, marks=pytest.mark.features),
        pytest.param(
            {},
            {"KVOFFLOAD_STORE": "auto", "KVOFFLOAD_LOAD_MODE": "parked"},
            3,
            {},
            marks=pytest.mark.features,
        ),
        ({"async_scheduling": True}, {}, 3, {}),
        (TP, {}, 0, FORKED),
    ],
    ids=["eager", "auto-parked", "async", "two-ranks"],
)
def test_the_tier_survives_sleep_whose_weights_stay(real, engine, tier, late, env):
    engine = {**ASLEEP, **engine}
    plain = {**ASLEEP, **{k: engine[k] for k in TP if k in engine}}
    off = vllm.must_play(real.off(["sleeps"], plain, **SWITCH, **env))
    run = real.on(["sleeps"], engine, tier, late, **SWITCH, **env)
    on = run["sleeps"]
    check(on, off["sleeps"])
    assert {name: on["cached"][name] for name in KEPT} == dict.fromkeys(KEPT, found(4))
    assert {name: on["cached"][name] for name in LOST} == dict.fromkeys(LOST, 0)
    assert run.log.count("are kept, the weights are the same") >= 3
    assert run.log.count("the weights have changed") == 1


def test_nothing_is_kept_where_it_is_not_wanted(real):
    off = real.off(["sleeps"], ASLEEP, **SWITCH)["sleeps"]
    on = real.on(["sleeps"], ASLEEP, {"KVOFFLOAD_KEEP_ASLEEP": "0"}, **SWITCH)["sleeps"]
    check(on, off)
    assert [name for name, tokens in on["cached"].items() if tokens] == ["level 0"]


def test_weights_that_are_updated_empty_the_tier(real):
    off = real.off(["updates"], **SWITCH)["updates"]
    run = real.on(["updates"], **SWITCH)
    on = run["updates"]
    assert on["tokens"] == off["tokens"]
    assert on["tokens"]["updated"] != on["tokens"]["again"]
    assert off["cached"] == {**dict.fromkeys(on["cached"], 0), "as vLLM has them": found(3)}
    kept = dict.fromkeys(("again", "reset, again", "updated, again"), found(3))
    assert on["cached"] == {**off["cached"], **kept}
    assert run.log.count("paused: weights were updated and vLLM's prefix cache has not been") == 1


def test_the_opt_out_serves_what_was_computed_with_the_weights_before(real):
    off = real.off(["updates"], **SWITCH)["updates"]
    on = real.on(["updates"], tier={"KVOFFLOAD_EMPTY_ON_UPDATE": "0"}, **SWITCH)["updates"]
    assert on["cached"]["updated"] == found(3)
    assert on["tokens"]["updated"] != off["tokens"]["updated"], "this test shows nothing"
