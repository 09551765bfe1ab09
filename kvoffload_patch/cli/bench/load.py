"""Seeded conversations that a GPU cache cannot hold together, and what a server makes of them.

A chat's next turn begins with all that was said before, and is asked for when all other chats have
had theirs. What counts as the answer in a history is made up as well, so that every mode is asked
exactly the same; what the model really answers is not looked at. Tokens are random, and two chats
share no block.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvoffload_patch.cli.bench.errors import ServerFailed
from kvoffload_patch.cli.bench.server import HOST, Server

# Tokens that every vocabulary has, behind those with a meaning of their own.
_FIRST, _LAST = 10, 1000
_REQUEST_S = 900.0
# How much more than the GPU caches hold the chats have, if nobody says how many there are.
WORKING_SET = 2.0


@dataclass(frozen=True)
class Load:
    """What is asked.

    Attributes:
        history: tokens of a chat's first prompt.
        new: tokens that each later turn adds, the answer before it not included.
        answer: tokens of each answer.
        turns: requests of a chat, 2 at least.
        at_once: clients; each sends its next request when its last one is answered.
    """

    history: int
    new: int
    answer: int
    turns: int
    at_once: int
    seed: int

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return self.history + (self.turns - 1) * (self.new + self.answer) + self.answer

    def chats_for(self, gpu_tokens: int) -> int:
        """Chats whose first prompts are `WORKING_SET` times what the GPU caches hold."""
        return max(2, -int(-WORKING_SET * gpu_tokens // self.history))

    def prompts(self, chat: int) -> list[list[int]]:
        """The prompt of each turn."""
        rng, prompt, made = random.Random(f"{self.seed}-{chat}"), list[int](), list[list[int]]()
        for turn in range(self.turns):
            count = self.new + self.answer if turn else self.history
            prompt = prompt + [rng.randrange(_FIRST, _LAST) for _ in range(count)]
            made.append(prompt)
        return made


@dataclass
class Answer:
    """One request: tokens of its prompt and those of them that were found, and seconds."""

    prompt: int
    found: int
    first_s: float
    token_s: float


def ask(server: Server, model: str, prompt: Sequence[int], count: int) -> Answer:
    """Send a request and read its answer to the end.

    Raises:
        ServerFailed: it is refused, breaks off, or has another number of tokens.
    """
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": count, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    connection = http.client.HTTPConnection(HOST, server.port, timeout=_REQUEST_S)
    try:
        sent = time.perf_counter()
        header = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), header)
        answer = connection.getresponse()
        if answer.status != 200:
            text = answer.read(500).decode("utf-8", "replace")
            raise server.failure(f"a request was answered with status {answer.status}: {text}")
        return _read(answer, server, len(prompt), count, sent)
    except (OSError, http.client.HTTPException) as error:
        raise server.failure(f"a request failed with {type(error).__name__}: {error}") from None
    finally:
        connection.close()


def _read(
    lines: http.client.HTTPResponse, server: Server, prompt: int, count: int, sent: float
) -> Answer:
    at, usage = list[float](), dict[str, Any]()
    for line in lines:
        now = time.perf_counter()
        if not line.startswith(b"data: {"):
            continue
        found = json.loads(line[len(b"data: ") :])
        if found.get("choices"):
            at.append(now)
        usage = found.get("usage") or usage
    if not at or usage.get("completion_tokens") != count:
        raise server.failure(f"expected {count} tokens, found {usage or 'an answer without end'}")
    details = usage.get("prompt_tokens_details") or {}
    per_token = (at[-1] - at[0]) / max(1, count - 1)
    return Answer(prompt, details.get("cached_tokens") or 0, at[0] - sent, per_token)


def play(server: Server, load: Load, chats: int) -> dict[str, Any]:
    """All chats, turn by turn; figures of the first turns and of the later ones.

    Raises:
        ServerFailed: of the first request that fails.
    """
    model = server.model()
    waiting = [load.prompts(chat) for chat in range(chats)]
    for prompt in ([_FIRST] * 64, [_FIRST + 1] * 64):
        ask(server, model, prompt, 4)  # what is made at the first request does not count
    turns = [_turn(server, load, model, [chat[turn] for chat in waiting])
             for turn in range(load.turns)]  # fmt: skip
    later = [answer for answers, _ in turns[1:] for answer in answers]
    return {
        "first": figures(turns[0][0], turns[0][1]),
        "later": figures(later, sum(seconds for _, seconds in turns[1:])),
    }


def _turn(
    server: Server, load: Load, model: str, prompts: Sequence[list[int]]
) -> tuple[list[Answer], float]:
    """One turn of every chat; answers, and seconds of all together."""
    left, lock = list(reversed(prompts)), threading.Lock()
    made, failed = list[Answer](), list[ServerFailed]()

    def client() -> None:
        while not failed:
            with lock:
                if not left:
                    return
                prompt = left.pop()
            try:
                made.append(ask(server, model, prompt, load.answer))
            except ServerFailed as error:
                failed.append(error)

    began = time.perf_counter()
    threads = [threading.Thread(target=client, daemon=True) for _ in range(load.at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return made, time.perf_counter() - began


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """For JSON: times in milliseconds, tokens summed."""
    return {
        "requests": len(answers),
        "seconds": round(seconds, 2),
        "prompt_tokens": sum(answer.prompt for answer in answers),
        "found_tokens": sum(answer.found for answer in answers),
        "first_token_ms": _spread([answer.first_s for answer in answers]),
        "output_token_ms": _spread([answer.token_s for answer in answers]),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    shares = {"p50": 0.5, "p99": 0.99}
    # The smallest that at least so large a share does not exceed.
    return {
        name: round(1000 * ordered[-int(-share * len(ordered) // 1) - 1], 2)
        for name, share in shares.items()
    }
