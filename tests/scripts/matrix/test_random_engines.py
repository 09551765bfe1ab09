"""`matrix random-engines` without an engine: what seeds ask for, and what counts as a difference.

The engines themselves: tests/engine/test_random_engines.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from engine import engines, random_engines, random_plan
from engine.random_plan import DRAFTS, Plan, Request

STEP = "max_num_batched_tokens"


@cache
def plans() -> list[Plan]:
    """Made once a test asks, and not in each worker of pytest-xdist."""
    return [random_plan.plan(seed) for seed in range(120)]


def asked_for() -> Iterator[tuple[Plan, Request]]:
    """Each request with its plan."""
    return ((plan, request) for plan in plans() for request in plan.requests)


def test_a_seed_gives_the_same_plan_and_another_seed_another() -> None:
    assert [random_plan.plan(plan.seed) for plan in plans()[:9]] == plans()[:9]
    assert len({repr(plan.requests) for plan in plans()}) == len(plans())


def test_the_first_seeds_are_of_all_kinds_and_ask_for_everything() -> None:
    like = Counter(name for plan in plans() for name in plan.likeness())
    assert set(like) == set(random_plan.LIKENESSES)
    asked = Counter(name for _, request in asked_for() for name in request.features())
    assert set(asked) == set(random_plan.ASKED)
    assert min(asked.values()) > 20


def _left_out(plan: Plan, request: Request) -> dict[str, bool]:
    """What vLLM fails at by itself or nobody has compared, and whether this is asked for."""
    asked, asynchronous = request.features(), plan.engine["async_scheduling"]
    drafts = plan.kind in DRAFTS
    return {
        "structured output with drafts": drafts and "structured" in asked,
        "min_tokens with drafts": drafts and "min_tokens" in asked,
        "min_tokens, asynchronous": asynchronous and "min_tokens" in asked,
        "samples with drafts": drafts and "samples" in asked,
        "sessions with drafts": drafts and "session" in asked,
        "sessions, asynchronous": asynchronous and "session" in asked,
        "embeddings, asynchronous": asynchronous and "embeddings" in asked,
        "prompt_logprobs and resets": "resets" in plan.has and "prompt_logprobs" in asked,
        "prompt_logprobs and adapters": plan.kind == "lora" and "prompt_logprobs" in asked,
        "prompt_logprobs of embeddings": {"prompt_logprobs", "embeddings"} <= asked,
        "adapters in a batch": "adapter" in asked and plan.engine["max_num_seqs"] > 1,
        "states and a stream": plan.kind == "states" and plan.late == "stream",
        "n-grams, asynchronous": plan.kind == "ngram" and asynchronous,
        "states in parts": plan.kind == "states" and "long_prefill_token_threshold" in plan.engine,
        "states in small steps": plan.kind == "states" and plan.engine[STEP] < 256,
        "images in small steps": plan.kind == "images" and plan.engine[STEP] < 128,
        "sessions beside a connector": "connector" in plan.has and "session" in asked,
        "sessions and new weights": "updates" in plan.has and "session" in asked,
        "a connector of one process": "connector" in plan.has and "two ranks" in plan.has,
        "a connector and new weights": {"connector", "updates"} <= plan.has,
        "a connector that knows tokens alone": "connector" in plan.has and plan.kind != "plain",
    }


def test_what_is_to_be_left_out_is_never_asked_for() -> None:
    asked = [_left_out(plan, request) for plan, request in asked_for()]
    assert {name for one in asked for name, is_asked in one.items() if is_asked} == set()


def test_what_plain_vllm_does_not_end_either_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends, none = f"... {random_plan.NO_END}: ['13']", "RuntimeError"
    for plain, failed in ((ends, False), (none, True)):
        run, other = (engines.Run(1, log) for log in (ends, plain))
        right = engines.Run(0, "", results={"asked_alone": {}})
        real = SimpleNamespace(
            loras=[], on=lambda *_, run=run, **__: run,
            off=lambda what, *_, right=right, other=other, **__:
                right if what == ["asked_alone"] else other,
        )  # fmt: skip
        models = SimpleNamespace(arguments=lambda plan: dict(plan.engine))
        seen, wrong = random_engines.play(real, models, 0)
        assert bool(wrong) == failed and bool(seen[random_plan.NO_END]) != failed


def test_requests_fit_into_the_model() -> None:
    for plan, request in asked_for():
        of_images = len(request.images) * (random_plan.IMAGE_TOKENS - 1)
        length = len(request.prompt) + of_images + request.sampling.get("max_tokens", 1)
        turns = sum(len(tokens) + count for tokens, count in request.turns)
        assert max(length, turns) <= plan.engine["max_model_len"]
        assert request.prompt and request.sampling.get("max_tokens", 1) > 0
        assert request.prompt.count(random_plan.IMAGE_TOKEN) == len(request.images)


def test_whole_prefills_fit_into_a_step() -> None:
    whole = [plan for plan in plans() if not plan.engine.get("enable_chunked_prefill", True)]
    assert whole
    assert all(plan.engine[STEP] >= plan.engine["max_model_len"] for plan in whole)


def test_what_needs_a_tokenizer_has_one() -> None:
    with_text = [
        (plan, r) for plan, r in asked_for() if r.features() & {"structured", "stop strings"}
    ]
    assert with_text
    assert not any(plan.engine["skip_tokenizer_init"] for plan, _ in with_text)


def test_loads_that_may_bring_flipped_bits_are_checked_first() -> None:
    flipped = [plan for plan in plans() if "TEST_FLIP_STORES" in plan.env]
    assert flipped
    for plan in flipped:
        assert plan.tier["KVOFFLOAD_INTEGRITY"] == "full"
        assert plan.tier["KVOFFLOAD_LOAD_MODE"] != "inline"


def test_the_command_plays_the_seed_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On models that it writes; no engine is started."""
    pytest.importorskip("torch")

    def play(real: Any, models: Any, seed: int) -> tuple[Counter[str], list[str]]:
        return Counter(stored=seed), [f"4: 2 tokens, not 3, of {len(real.loras)} adapters"]

    monkeypatch.setattr(random_engines, "play", play)
    assert random_engines.main("8", "0") == 1
    told = capsys.readouterr().out
    assert "8: FAILED" in told and "1 runs, 1 failed" in told and "of 2 adapters" in told


RIGHT = {
    "tokens": [5, 6, 7],
    "reason": "length",
    "logprobs": [{"5": -0.1, "9": -3.0}, {"6": -0.7, "9": -0.7}, {"7": -0.2, "9": -2.0}],
    "prompt_logprobs": None,
}


@pytest.mark.parametrize(
    ("answer", "state", "why"),
    [
        ({}, "done", None),
        ({"tokens": [5, 6]}, "aborted", None),
        ({"tokens": [5, 6]}, "done", "2 tokens, not 3"),
        ({"tokens": [5, 6, 7, 8]}, "aborted", "4 tokens, not 3"),
        ({"tokens": [9, 6, 7]}, "done", "token 0"),
        ({"tokens": [9]}, "aborted", "token 0"),
        ({"tokens": [5, 9, 3]}, "done", None),  # the two were equally likely
        ({"reason": "stop"}, "done", "ended by stop, not length"),
        ({"logprobs": [{"5": -0.12}, {"6": -0.7}, {"7": -0.2}]}, "done", None),
        ({"logprobs": [{"5": -0.2}, {"6": -0.7}, {"7": -0.2}]}, "done", "other logprobs"),
        ({"logprobs": [{"5": -0.1}]}, "done", "other logprobs"),
        ({"logprobs": None}, "done", None),
        ({"prompt_logprobs": [{"1": -1.0}]}, "done", "other prompt_logprobs"),
    ],
)
def test_an_answer_is_compared_as_far_as_it_was_given(
    answer: dict[str, Any], state: str, why: str | None
) -> None:
    name = "3 again"
    played = {"left": [], "answers": {name: {"0": {**RIGHT, **answer}}}, "states": {name: state}}
    found = random_engines.differences({"3": {"0": RIGHT}}, played)
    assert [one for one in found if why is None or why not in one] == []
    assert len(found) == (why is not None)


def test_what_was_answered_with_the_second_weights_is_compared_with_theirs() -> None:
    second, right = {"0": {**RIGHT, "tokens": [8, 6, 7]}}, {"3": {"0": RIGHT}}
    played = {"left": [], "answers": {"3": second}, "states": {"3": "done"}}
    right["3 second"] = second
    assert random_engines.differences(right, {**played, "second": ["3"]}) == []
    (found,) = random_engines.differences(right, {**played, "second": []})
    assert "token 0" in found


def test_samples_that_are_missing_and_what_is_left_behind_are_told() -> None:
    played = {"left": ["slots: 1"], "answers": {"3": {"0": RIGHT}}, "states": {"3": "done"}}
    found = random_engines.differences({"3": {"0": RIGHT, "1": RIGHT}}, played)
    assert found == ["slots: 1", "3: samples ['0'], not ['0', '1']"]


def test_what_was_never_seen_is_told() -> None:
    seen = Counter({"run: lora": 2, "adapter": 9, "loaded": 7, "session": 0})
    told = random_engines.summary(2, seen, {8: ["4: 2 tokens, not 3"]})
    runs, _, never, *_ = lines = told.splitlines()
    assert runs == "2 runs, 1 failed"
    assert never.startswith("    NEVER: plain, window") and "lora" not in never
    assert sum("NEVER" in line for line in lines) == 3
    assert "session" in next(line for line in lines if "NEVER: salt" in line)
    assert lines[-2:] == ["seed 8:", "    4: 2 tokens, not 3"]
