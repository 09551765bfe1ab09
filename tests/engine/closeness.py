"""Answers that rounding may have changed, and prompts that go on behind an answer of some blocks.

Sums of 16-bit numbers round otherwise in batches of another size, and two tokens can be equally
likely. Which of them an engine answers then shows nothing; how far it is behind the other one does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from scenarios import Prompt, Stage, cached_of, prompts, tokens_of
from vllm import SamplingParams

# Prompts whose answers outgrow a cache of few blocks together.
OUTGROWN = prompts(26, 8, 360)


def behind_the_best(stage: Stage) -> dict[str, Any]:
    """How far behind the likeliest token those are that other engines gave in `conversations`.

    Natural log of the ratio, for each token of each answer, of each engine in ``TEST_ANSWERS``;
    this engine is asked for one answer at a time, and computes all of it as a prompt.
    """
    return {"behind": _behind(stage, _asked)}


def outgrown_behind_the_best(stage: Stage) -> dict[str, Any]:
    """The same of answers to `outgrown`."""
    return {"behind": _behind(stage, partial(zip, OUTGROWN))}


def _behind(
    stage: Stage, asked: Callable[[Sequence[Prompt]], Iterable[tuple[Prompt, Prompt]]]
) -> list[list[list[float]]]:
    told = SamplingParams(max_tokens=1, temperature=0, detokenize=False, prompt_logprobs=1)
    found: list[list[list[float]]] = []
    for answers in json.loads(os.environ["TEST_ANSWERS"]):
        found.append([])
        for prompt, answer in asked(answers):
            whole = {"prompt_token_ids": prompt + answer}
            (output,) = stage.llm.generate([whole], told, use_tqdm=False)
            likely = zip(answer, output.prompt_logprobs[len(prompt) :])
            found[-1].append([_best(of) - of[token].logprob for token, of in likely])
    return found


def _best(likely: dict[int, Any]) -> float:
    return max(one.logprob for one in likely.values())


def _asked(answers: Sequence[Prompt]) -> Iterator[tuple[Prompt, Prompt]]:
    """The prompts of `conversations`, which these answers are part of, each with its answer."""
    talks = prompts(1, 10, 380)
    for at, answer in enumerate(answers):
        turn, talk = divmod(at, len(talks))
        yield list(talks[talk]), answer
        talks[talk] += answer + prompts(100 + turn, 1, 90)[0]


def long_answers(stage: Stage) -> dict[str, Any]:
    """Answers that fill a block and more, and prompts that go on behind them; each asked alone."""
    talks = [prompts(70 + n, 1, 100 + 7 * n)[0] for n in range(6)]
    answers = [tokens_of(stage.play([talk], max_tokens=170))[0] for talk in talks]
    stage.push_out(71)
    behind, cached = prompts(72, 1, 150)[0], 0
    for talk, answer in zip(talks, answers[:6]):
        outputs = stage.play([talk + answer + behind])
        answers += tokens_of(outputs)
        cached += sum(cached_of(outputs))
    return {"tokens": answers, "cached": cached, "tier": stage.tier_stats()}
