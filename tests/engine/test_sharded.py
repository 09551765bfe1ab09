"""Two ranks that each hold half of every block's tokens (decode context parallelism)."""

from __future__ import annotations

import pytest
from engine import engines, release
from engine import plain as vllm
from engine.report import assert_same

RANKS = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
HERE = {"TEST_FORK_WORKERS": "1", "TEST_SHARDED_ATTENTION": "1"}
PLAYED = ["setup", "sensitivity", "conversations", "preemption", "reset"]


@pytest.mark.features
@pytest.mark.parametrize("mode", ["inline", "parked"])
def test_what_each_rank_has_of_a_block_comes_back(real, mode):
    if why := release.no_sharded_blocks():
        pytest.skip(why)
    # A block has as many tokens, over both ranks, as in other tests.
    model = {"model": real.one_kv_head, "block_size": release.BLOCK // 2, **RANKS}
    model["num_gpu_blocks_override"] = 24
    off = vllm.must_play(real.off(PLAYED, model, **HERE))
    on = real.on(PLAYED, model, {"KVOFFLOAD_LOAD_MODE": mode}, late=3, **HERE)
    answers = [tuple(answer) for answer in off["sensitivity"]["tokens"]]
    assert len(set(answers)) == len(answers), "a lost KV cache would go unnoticed"
    for name in PLAYED[1:]:
        assert_same(on[name], off[name])
    assert off["conversations"]["cached"] == 0 < on["conversations"]["cached"]
    assert on["conversations"]["tier"]["loaded"] > 0.9 * engines.evicted_tokens() // release.BLOCK
    assert on["preemption"]["preemptions"] > 0
    assert "one copy for ranks" not in on.log, "each has other tokens of a block"
