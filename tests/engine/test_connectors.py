"""Beside a KV connector whose loads fail: what they have left is not read from the tier."""

from __future__ import annotations

import json
import re

import pytest
from engine import plain as vllm

ANSWERS = 48


def connector(policy, beside, fail_every=2, name="FlakyConnector", **more):
    """Arguments of an engine with a connector every second load of which fails."""
    config = {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_module_path": re.sub(r"(?<=.)(?=[A-Z])", "_", name).lower(),
        "kv_connector_extra_config": {"use_async": beside, "fail_every": fail_every, **more},
        "kv_load_failure_policy": policy,
    }
    return {"kv_transfer_config": json.dumps(config)}


# Policy, loads beside the step, asynchronous scheduling, and how late copies are: a late store
# copies what has been recomputed meanwhile. With asynchronous scheduling and "recompute", plain
# vLLM 0.32.0 ends by itself at a load within the step that fails; plain vLLM 0.19.1 does at a load
# beside the step that fails and is not recomputed: it counts the -1 tokens that such a request has.
PLAYED = [
    pytest.param("recompute", False, False, 0, marks=pytest.mark.features),
    ("recompute", False, False, 3),
    pytest.param("recompute", True, False, 3, marks=pytest.mark.features),
    ("recompute", True, True, 0),
    pytest.param("fail", False, False, 0, marks=pytest.mark.features),
    ("fail", False, True, 3),
    pytest.param("fail", True, False, 0, marks=pytest.mark.features),
]


@pytest.mark.parametrize(("policy", "beside", "asynchronous", "late"), PLAYED)
def test_what_a_failed_load_left_is_not_stored(real, policy, beside, asynchronous, late):
    right = real.off(["flaky_connector"])["flaky_connector"]["first"]
    engine = connector(policy, beside)
    if asynchronous:
        engine["async_scheduling"] = True
    if vllm.may_fail():
        alone = vllm.must_play(real.off(["flaky_connector"], engine))["flaky_connector"]
        vllm.must_answer(alone["first"], right)
    on = real.on(["flaky_connector"], engine, {}, late=late)["flaky_connector"]
    assert len(right) == ANSWERS and on["failed"] >= ANSWERS // 4
    wrong = [
        (time, at)
        for time in ("first", "again")
        for at, (found, expected) in enumerate(zip(on[time], right))
        if found not in (expected, None)
    ]
    assert wrong == []
    if policy == "recompute":
        assert None not in on["first"] + on["again"]
    assert on["blocks_loaded"] > 0, "nothing that was stored was read again"


@pytest.mark.features
def test_states_that_a_connector_brings_come_back_from_the_tier(real, record_property):
    """Compared with plain vLLM whose GPU holds all: each prompt is cut where its hit ends.

    They come beside the step: vLLM's runners copy a state on before loads within the step begin.
    """
    with vllm.must_have_model():
        model = real.architecture("qwen3_next")
    engine = {"model": model, "enable_prefix_caching": True, "dtype": "bfloat16"}
    off = real.off(["flaky_connector"], {**engine, "num_gpu_blocks_override": 500})
    right = vllm.must_play(off)["flaky_connector"]["again"]
    assert len({tuple(answer) for answer in right}) == len(right) == ANSWERS
    engine |= connector("fail", True, fail_every=0, name="StateConnector")
    if not vllm.is_default():
        vllm.must_play(real.off(["flaky_connector"], {**engine, "num_gpu_blocks_override": 500}))
    few = {**engine, "num_gpu_blocks_override": 48}
    run = real.on(["flaky_connector"], few, {}, late=3)
    if refusal := vllm.refused(run):
        record_property("refusal", refusal.group())
        return
    on = run["flaky_connector"]
    assert on["loads"] >= ANSWERS, "the connector has brought nothing"
    assert on["first"] == right and on["again"] == right
    assert on["blocks_loaded"] > 0, "nothing that was stored was read again"


@pytest.mark.features
def test_what_a_connector_fills_from_the_host_does_not_overtake_a_store(real):
    """Copies that a step waits for are made as late as on a stream, behind what the host does."""
    right = real.off(["flaky_connector"])["flaky_connector"]["first"]
    engine = connector("fail", True, fail_every=0, at_once=True)
    on = real.on(["flaky_connector"], engine, {}, late="stream")["flaky_connector"]
    assert on["loads"] >= ANSWERS and on["failed"] == 0
    assert on["first"] == right and on["again"] == right
    assert on["blocks_loaded"] > 0, "nothing that was stored was read again"
