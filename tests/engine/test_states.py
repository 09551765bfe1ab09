"""A model some of whose layers keep a state: what has left the GPU comes back with its state."""

from __future__ import annotations

import pytest
from engine import release
from engine.report import assert_same

PLAYED = ["setup", "sensitivity", "lengths", "conversations", "preemption"]


@pytest.mark.skipif(release.version() != "0.32.0", reason="the tier refuses states elsewhere")
def test_a_prefix_comes_back_with_its_state(real):
    model = real.architecture("qwen3_next")
    engine = {"model": model, "enable_prefix_caching": True, "dtype": "bfloat16"}
    # Beside a plain engine whose GPU holds everything: a state that decoding left at the end of a
    # block is not the very bits of one that is computed again as part of a prompt.
    off = real.off(PLAYED, {**engine, "num_gpu_blocks_override": 500})
    few = {**engine, "num_gpu_blocks_override": 48}
    on = real.on(PLAYED, few, {"KVOFFLOAD_LOAD_MODE": "parked"}, late=3)
    answers = [tuple(answer) for answer in off["sensitivity"]["tokens"]]
    assert len(set(answers)) == len(answers), "a lost state would go unnoticed"
    assert on["setup"]["groups"] == 2
    for name in PLAYED[1:]:
        assert_same(on[name], off[name])
    for name in ("lengths", "conversations"):
        assert on[name]["cached"] == off[name]["cached"] > 0, "something did not come back"
    assert on["conversations"]["tier"]["loaded"] > 100
    assert on["preemption"]["preemptions"] > 0
