"""One engine on two nodes, by vLLM's own executor: each runs one of two tensor-parallel ranks.

The second is on what looks like a host of its own, which shares nothing with the first but network.
"""

from __future__ import annotations

from functools import partial

import pytest
from engine import engines, nodes
from engine import plain as vllm
from engine.report import assert_same
from engine.shared_memory import files_left

from scripts.soak import watch

pytestmark = pytest.mark.features
PLAYED = ["setup", "conversations", "reset"]
TIER = {"KVOFFLOAD_CPU_GIB": "0.25"}
FORKED = {"TEST_FORK_WORKERS": "1"}


@pytest.fixture(scope="module", autouse=True)
def _possible(real, tmp_path_factory):
    if nodes.why_not():
        pytest.skip(nodes.why_not())
    if vllm.may_fail():
        log = tmp_path_factory.mktemp("plain") / "log"
        alone = nodes.SecondNode({"model": real.model}, log, None)
        with vllm.must_end(), alone as second:
            vllm.must_play(real.off(["setup"], second.first, **nodes.environment()))


@pytest.mark.parametrize("kind", ["a KV head each", "the same bytes"])
def test_a_rank_on_another_host_answers_the_same(real, tmp_path, kind):
    model = {"model": real.model if kind == "a KV head each" else real.one_kv_head}
    off = real.off(PLAYED, {**model, "tensor_parallel_size": 2}, **FORKED)
    # What the second node is given besides the switch does not count.
    other = {"KVOFFLOAD_CPU_GIB": "0.001", "KVOFFLOAD_LOAD_MODE": "inline"}
    with nodes.SecondNode(model, tmp_path / "log", other, late=3) as second:
        mode = {"KVOFFLOAD_LOAD_MODE": "parked"}
        on = real.on(PLAYED, second.first, {**TIER, **mode}, late=3, **nodes.environment())
    for name in PLAYED[1:]:
        assert_same(on[name], off[name])
    assert off["conversations"]["cached"] == 0
    assert on["conversations"]["tier"]["loaded"] > 0.9 * engines.evicted_tokens() // 128
    assert "one copy for ranks" not in on.log
    said = "ranks on 2 hosts hold the same bytes, and each host keeps a copy of them"
    assert (said in on.log) == (kind == "the same bytes")
    # A quarter of a GiB over both, each slot once on each host.
    assert on["setup"]["slots"] == (1 << 28) // (2 * _slot_bytes(kind))


def _slot_bytes(kind: str) -> int:
    layers, head, tokens, float32, keys_and_values = 4, 32, 128, 4, 2
    heads = 2 if kind == "a KV head each" else 1
    return layers * heads * head * tokens * float32 * keys_and_values


def test_a_node_without_the_tier_is_refused_by_name(real, tmp_path):
    with nodes.SecondNode({"model": real.model}, tmp_path / "log", None) as second:
        run = real.on(["setup"], second.first, TIER, **nodes.environment())
    assert run.returncode != 0
    lines = [line for line in run.log.splitlines() if "kvoffload_patch: rank 1 (pid " in line]
    assert lines and f" on {nodes.NAME}) cannot take part: expected execute_model of" in lines[-1]
    assert lines[-1].endswith("(start vLLM through kvoffload_patch on every host)")


@pytest.mark.parametrize("when", ["node_lost", "node_lost_at_work"])
def test_a_node_that_is_lost_ends_the_engine_as_without_the_tier(
    real, tmp_path, record_property, when
):
    vllm.only_here("a lost node")
    ends, before = [], watch.files_left()
    for tier in (None, TIER):
        with nodes.SecondNode({"model": real.model}, tmp_path / "log", tier) as second:
            lost = {"TEST_LOSE": str(second.pid), **nodes.environment()}
            play = real.off if tier is None else partial(real.on, tier=tier)
            ends.append(play([when], second.first, **lost)[when])
    nodes.assert_end_alike(record_property, ends, executor="multi-node mp", when=when)
    assert not files_left(before)
