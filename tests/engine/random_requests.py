"""Asks an engine for the requests of `random_plan`, and keeps what is answered."""

from __future__ import annotations

import copy
import os
from collections import Counter
from functools import cache
from typing import Any

import random_plan
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

_DIGITS = 4  # of a likelihood


def params(request: random_plan.Request, **more: Any) -> SamplingParams:
    """What a request says of its answer; ``more``: besides, or instead."""
    if request.regex:
        from vllm.sampling_params import StructuredOutputsParams

        more["structured_outputs"] = StructuredOutputsParams(regex=request.regex)
    return SamplingParams(**{**request.sampling, **more})


def prompt_of(request: random_plan.Request) -> dict[str, Any]:
    """The prompt, as `vllm.LLM` takes it."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt)}
    if request.embeds:
        prompt = {"prompt_embeds": _embeddings()[request.prompt]}
    if request.images:
        from images import noise

        prompt["multi_modal_data"] = {"image": [noise(seed) for seed in request.images]}
    return {**prompt, **({"cache_salt": request.salt} if request.salt else {})}


@cache
def _embeddings() -> Any:
    """Of each token, of the width that `model` has."""
    import torch
    from model import HIDDEN, VOCABULARY

    return torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(7))


def lora_of(request: random_plan.Request) -> LoRARequest | None:
    """One of the adapters of ``TEST_LORAS``, or none."""
    if not request.lora:
        return None
    folder = os.environ["TEST_LORAS"].split(os.pathsep)[request.lora - 1]
    return LoRARequest(f"adapter {request.lora}", request.lora, folder)


def ask(
    engine: Any,
    name: str,
    request: random_plan.Request,
    by_priority: bool,
    lora: LoRARequest | None,
) -> None:
    """Ask a `vllm.LLMEngine`."""
    priority = request.priority if by_priority else 0
    asked = prompt_of(request), params(request)
    engine.add_request(name, *asked, lora_request=lora, priority=priority)


def one_answer(output: Any, one: Any) -> dict[str, Any]:
    """One of an output's answers, such as JSON can have."""
    return {
        "tokens": list(one.token_ids),
        "reason": one.finish_reason,
        "logprobs": _likely(one.logprobs),
        "prompt_logprobs": _likely(output.prompt_logprobs),
    }


def _likely(places: Any) -> list[dict[str, float]] | None:
    """For each place, how likely some tokens are there; the first of a prompt has none."""
    if places is None:
        return None
    return [
        {str(token): round(one.logprob, _DIGITS) for token, one in (place or {}).items()}
        for place in places
    ]


class Answers:
    """What has been answered so far, by the name of a request and the number of its sample.

    A name begins with the number of a request in its plan, but for those that are of no matter.
    """

    def __init__(self) -> None:
        self._answers: dict[str, dict[str, Any]] = {}
        self._states: dict[str, str] = {}
        self._sessions: set[str] = set()

    def asked(self, name: str, session: bool = False) -> None:
        """It may be answered from now on; the outputs of a session have only what is new."""
        self._states.setdefault(name, "open")
        if session:
            self._answers.setdefault(name, {"0": {"tokens": []}})
            self._sessions.add(name)

    def aborted(self, name: str) -> None:
        """It is answered no further."""
        self._states[name] = "aborted"

    def open(self) -> list[str]:
        """Who waits for an answer, or for the rest of it."""
        return [name for name, state in self._states.items() if state == "open"]

    def begun(self, name: str) -> bool:
        """Whether any of its answer was given."""
        return name in self._answers

    def done(self) -> list[int]:
        """Numbers of the requests that were answered in full."""
        whole = [name for name, state in self._states.items() if state == "done"]
        return [int(name) for name in whole if name.isdigit()]

    def take(self, output: Any) -> None:
        """What an engine gives out of a step."""
        name = output.request_id
        if output.finished and self._states[name] == "open":
            self._states[name] = "done"
        if name in self._sessions:
            self._answers[name]["0"]["tokens"] += output.outputs[0].token_ids
            return
        mine = self._answers.setdefault(name, {})
        for one in output.outputs:
            mine[str(one.index)] = one_answer(output, one)

    def result(self) -> dict[str, Any]:
        """All of them, and who is in which state."""
        mine = {name: one for name, one in self._answers.items() if name.split()[0].isdigit()}
        return {"answers": mine, "states": self._states}


class Sessions:
    """Streaming sessions, of which each turn is asked for when `turn` is called."""

    def __init__(
        self, engine: Any, requests: list[random_plan.Request], answers: Answers, seen: Counter[str]
    ) -> None:
        self._engine, self._requests = engine, requests
        self._answers, self._seen = answers, seen
        self._ids: dict[int, str] = {}
        self._turns: dict[int, int] = {}
        self._over: set[int] = set()

    def open(self) -> list[int]:
        """Numbers of those that were asked for and may have another turn."""
        return [at for at in self._turns if at not in self._over]

    def turn(self, at: int, by_priority: bool) -> None:
        """Ask for the next turn, or say that there is none."""
        turns = self._requests[at].turns
        turn = self._turns.get(at, 0)
        self._answers.asked(str(at), session=True)
        if turn < len(turns):
            self._send(at, *turns[turn], by_priority, goes_on=True)
            self._seen["turns"] += 1
        else:
            self._over.add(at)
            self._send(at, [0], 1, by_priority, goes_on=False)
        self._turns[at] = turn + 1

    def abort(self, name: str) -> bool:
        """Whether it is the name of a session, which is over then."""
        if int(name) not in self._turns:
            return False
        self._over.add(int(name))
        self._engine.abort_request([self._ids[int(name)]], internal=True)
        return True

    def _send(
        self, at: int, tokens: list[int], count: int, by_priority: bool, goes_on: bool
    ) -> None:
        """As `vllm.AsyncLLM` does it, which alone has sessions for its users."""
        from vllm.sampling_params import RequestOutputKind

        request, processor = self._requests[at], self._engine.input_processor
        asked = processor.process_inputs(
            self._ids.get(at, str(at)),
            {"prompt_token_ids": list(tokens)},
            params(request, max_tokens=count, output_kind=RequestOutputKind.DELTA),
            supported_tasks=self._engine.get_supported_tasks(),
            lora_request=lora_of(request),
            priority=request.priority if by_priority else 0,
            resumable=goes_on,
        )
        if at not in self._ids:
            processor.assign_request_id(asked)
            self._ids[at] = asked.request_id
        asked.external_req_id = str(at)
        self._engine.output_processor.add_request(asked, None, None, 0)
        given = copy.copy(asked)  # the two lengthen their lists
        given.prompt_token_ids = list(tokens)
        self._engine.engine_core.add_request(given)
