"""Loads waited for layer by layer: every layer waits for its own KV before it computes."""

from __future__ import annotations

import re

import pytest
from engine import engines, ways
from engine.model import LAYERS

SCENARIOS = ["conversations", "twins", "one_token"]
BY_LAYER = {"KVOFFLOAD_LOAD_BY_LAYER": "1"}


def counted(run: engines.Run, what: str) -> int:
    found = re.search(rf"'{what}': (\d+)", run.log)
    assert found, run.log[-4000:]
    return int(found.group(1))


def check(run: engines.Run, plain: engines.Run) -> None:
    for scenario in SCENARIOS:
        assert run[scenario]["tokens"] == plain[scenario]["tokens"]
    assert f"loads come by layer, {LAYERS} of them" in run.log
    steps = counted(run, "steps by layer")
    assert steps >= 10
    assert counted(run, "waits for a group") == steps * LAYERS


def test_tokens_are_right_when_each_layer_arrives_as_late_as_it_may(real, plain):
    check(real.on(SCENARIOS, late="layers", tier=BY_LAYER), plain)


@pytest.mark.features
@pytest.mark.skipif(
    ways.chosen() == "v2", reason="Triton's interpreter runs V2 on the CPU, and nothing is compiled"
)
def test_a_compiled_pass_comes_by_the_gate_too(real):
    compiled = {"enforce_eager": False}
    run = real.on(SCENARIOS, compiled, late="layers", tier=BY_LAYER)
    check(run, real.off(SCENARIOS, compiled))


@pytest.mark.parametrize("layer", [0, LAYERS - 2])
def test_a_wait_that_is_missing_would_be_seen(real, plain, layer):
    run = real.on(["conversations"], late=f"deaf to {layer}", tier=BY_LAYER)
    assert run["conversations"]["tokens"] != plain["conversations"]["tokens"]
