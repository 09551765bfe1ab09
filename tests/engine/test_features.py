"""Shapes and features of docs/features.md, each beside plain vLLM on the same prompts."""

from __future__ import annotations

import pytest
from engine import plain as vllm
from engine import release
from engine.report import assert_same

pytestmark = pytest.mark.features
PARKED = {"KVOFFLOAD_LOAD_MODE": "parked"}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
# How the drafts are made, how many at a time, and whether the draft is the target itself.
DRAFTS = {
    "ngram": (NGRAM, 3),
    "draft_model": ({"method": "draft_model", "model": "target"}, 3),
    "eagle3": ({"method": "eagle3", "model": "eagle3"}, 2),
    "mtp": ({"method": "mtp"}, 1),
}


@pytest.fixture(scope="module")
def drafts(real):
    return real.drafts()


@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts_are_accepted_and_what_comes_back_has_their_kv(real, drafts, kind):
    asked, tokens = DRAFTS[kind]
    model = {"model": drafts["mtp" if kind == "mtp" else "target"]}
    off = vllm.must_play(real.off(["sensitivity", "guesses"], model))
    speculative = {**asked, "num_speculative_tokens": tokens}
    if "model" in asked:
        speculative["model"] = drafts[asked["model"]]
    engine = {**model, "speculative_config": json_of(speculative)}
    if vllm.may_fail():
        vllm.must_play(real.off(["guesses"], engine))
    on = real.on(["sensitivity", "guesses"], engine, PARKED, late=3)
    answers = [tuple(answer) for answer in off["sensitivity"]["tokens"]]
    assert len(set(answers)) == len(answers), "a lost KV cache would go unnoticed"
    for name in ("sensitivity", "guesses"):
        assert_same(on[name], off[name])
    assert sum(off["guesses"]["cached"]) == 0 < sum(on["guesses"]["cached"])
    assert on["guesses"]["tier"]["loaded"] > 0
    (_, drafted, accepted), (_, again, accepted_again) = on["guesses"]["counted"]
    assert accepted > 0 and accepted_again > 0, "no draft was accepted"
    if kind == "draft_model":  # the target itself: a draft is refused where its KV is not right
        assert (accepted, accepted_again) == (drafted, again)
    else:
        assert accepted < drafted and accepted_again < again


def test_hidden_states_come_back(real):
    """In a group of their own, beside windows; a connector of vLLM's reads them from there."""
    config = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}
    kept = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    engine = {"model": real.windows, "num_gpu_blocks_override": 72}
    engine["speculative_config"] = json_of({**kept, "draft_model_config": config})
    played = ["setup", "hidden_states"]
    off = vllm.must_play(real.off(played, engine))
    on = real.on(played, engine, PARKED, late=3)
    assert off["setup"]["groups"] == on["setup"]["groups"] == 3
    assert_same(on["hidden_states"], off["hidden_states"])
    expected, found = (run["hidden_states"]["hidden"] for run in (off, on))
    assert len({sums[0] for sums in expected}) == len(expected) // 2, "prompts have the same"
    for mine, plain in zip(found, expected, strict=True):
        assert mine == pytest.approx(plain, rel=1e-3)
    assert sum(off["hidden_states"]["cached"]) == 0 < sum(on["hidden_states"]["cached"])


def json_of(config):
    """Hashable, as engines are shared by their arguments."""
    import json

    return json.dumps(config)


def test_two_images_with_the_same_placeholders_are_kept_apart(real):
    with vllm.must_have_model():
        engine = {"model": real.llava(), "skip_tokenizer_init": False}
    off = vllm.must_play(real.off(["images"], engine))["images"]
    on = real.on(["images"], engine, PARKED, late=3)["images"]
    assert_same(on, off)
    assert off["tokens"][0] == off["tokens"][2] != off["tokens"][1], "images answer the same"
    found = (on["placeholders"] - 1) // release.block_size() * release.block_size()
    assert off["cached"] == [0] * 6 and on["cached"] == [0] * 3 + [found] * 3


@pytest.mark.parametrize("mode", ["inline", "parked"])
def test_chunks_of_attention_come_back(real, mode):
    with vllm.must_have_model():
        model = {"model": real.architecture("llama4_text"), "num_gpu_blocks_override": 48}
    model["max_model_len"] = 1024
    played = ["setup", "sensitivity", "conversations", "twins"]
    off = vllm.must_play(real.off(played, model))
    on = real.on(played, model, {"KVOFFLOAD_LOAD_MODE": mode}, late=3)
    assert off["setup"]["groups"] == on["setup"]["groups"] > 1
    for name in played[1:]:
        assert_same(on[name], off[name])
    assert on["conversations"]["cached"] > off["conversations"]["cached"]
    assert on["twins"]["blocks_loaded"] > 0


@pytest.mark.parametrize("parallel", [False, True], ids=["tensors", "experts"])
def test_experts_on_two_ranks(real, parallel):
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": parallel}
    with vllm.must_have_model():
        engine = {"model": real.architecture("mixtral"), **ranks}
    off = real.off(["sensitivity", "conversations"], engine, TEST_FORK_WORKERS="1")
    vllm.must_play(off, even_here=parallel)
    on = real.on(["sensitivity", "conversations"], engine, PARKED, late=3, TEST_FORK_WORKERS="1")
    for name in ("sensitivity", "conversations"):
        assert_same(on[name], off[name])
    assert on["conversations"]["cached"] > 0 == off["conversations"]["cached"]


@pytest.mark.skipif(bool(release.no_expert_records()), reason=release.no_expert_records())
@pytest.mark.parametrize("mode", ["inline", "parked"])
def test_experts_of_hits(real, mode):
    engine = {"model": real.architecture("mixtral"), "enable_return_routed_experts": True}
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TEST_TRITON": "1"}  # which alone has them
    off = real.off(["experts"], engine, fresh=True, **runner)["experts"]
    tier = {"KVOFFLOAD_LOAD_MODE": mode}
    on = real.on(["experts"], engine, tier, late=3, fresh=True, **runner)["experts"]
    assert_same(on, off)
    assert on["experts"] == off["experts"]
    assert on["cached"][6:] == [440 // release.block_size() * release.block_size()] * 6
    assert off["cached"][6:] == [0] * 6 and on["loaded"]


def test_two_engines_of_one_client_load_from_a_tier_each(real):
    engine = {"data_parallel_size": 2, "num_gpu_blocks_override": 18}
    apart = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TEST_FORK_WORKERS": "1"}
    off = vllm.must_play(real.off(["each_engine"], engine, **apart))["each_engine"]
    on = real.on(["each_engine"], engine, **apart)["each_engine"]
    assert_same(on, off)
    assert off["loaded"] == 0 < on["loaded"]
