"""The client: one request to a server's /v1/completions, and when its tokens came.

vLLM's own benchmarks cannot ask for what is measured here. `vllm bench serve` (0.26.0) sends
requests that are known before it starts, so no history grows from the model's answers; from a
server without a tokenizer it asks for one token only (`CustomDataset.sample`), and it does not say
how many prompt tokens were found in a cache. `benchmarks/multi_turn` does grow histories, but lies
in vLLM's repository and not in its wheels, and needs a tokenizer. So the requests are sent from
here, with aiohttp as theirs are, and times are taken as theirs: the first token's from right before
the request is sent until its first chunk has come.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp

    from scripts.bench.chats.load import Tokens

MODEL = "bench"  # the name that servers are started with
LINE_BYTES = 1 << 22  # a first chunk repeats the prompt's tokens; aiohttp's own limit is 128 KiB


@dataclass
class Answer:
    """One request and its answer.

    Attributes:
        name: of the request; the server's own name for it contains this.
        prompt: tokens.
        cached: tokens of the prompt that were found in any cache.
        sent: seconds on `time.perf_counter`, as all times here.
        at: when the chunk of each token came.
        engine: what the server says of the request's time in the engine, if asked to.
    """

    name: str
    prompt: int
    sent: float = 0.0
    cached: int = 0
    tokens: Tokens = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.at[0] - self.sent

    @property
    def whole(self) -> float:
        """Seconds to the last token."""
        return self.at[-1] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in zip(self.at, self.at[1:])]

    def take(self, line: bytes, now: float) -> None:
        """One line of the server's stream.

        Raises:
            RuntimeError: the server says that the request failed.
        """
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            return
        found = json.loads(line[6:])
        if "error" in found:
            raise RuntimeError(f"{self.name}: expected tokens, found {found['error']}")
        for choice in found["choices"]:
            new = choice.get("token_ids") or []
            self.tokens += new
            self.at += [now] * len(new)
        if usage := found.get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            self.cached = details.get("cached_tokens") or 0
        self.engine.update(found.get("metrics") or {})


def body(prompt: Tokens, answer: int) -> bytes:
    """A request: greedy, of a fixed length, streamed as token ids."""
    asked = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": answer,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(asked).encode()


async def ask(
    session: aiohttp.ClientSession, url: str, name: str, prompt: Tokens, answer: int
) -> Answer:
    """Send one request and wait for its last token.

    Raises:
        RuntimeError: it was refused, failed, or was answered with another number of tokens.
    """
    made, sent = Answer(name, len(prompt)), body(prompt, answer)
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    made.sent = time.perf_counter()
    async with session.post(f"{url}/v1/completions", data=sent, headers=headers) as response:
        if response.status != 200:
            text = (await response.text())[:500]
            raise RuntimeError(f"{name}: expected status 200, found {response.status}: {text}")
        async for line in response.content:
            made.take(line, time.perf_counter())
    if len(made.tokens) != answer:
        raise RuntimeError(f"{name}: expected {answer} tokens, found {len(made.tokens)}")
    return made


async def counted(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The tier's samples in the server's /metrics, without vLLM's own labels; none without one."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    found = (_sample(line) for line in text.splitlines() if line.startswith("kvoffload_"))
    return {name: value for name, value in found if "_bucket{" not in name}


def _sample(line: str) -> tuple[str, float]:
    name, _, value = line.rpartition(" ")
    bare = re.sub(r',?(model_name|engine)="[^"]*"', "", name).replace("{,", "{")
    return bare.replace("{}", ""), float(value)


def session() -> aiohttp.ClientSession:
    """Connections to a server: as many as are needed, without a time limit.

    Idle ones are given up before the server does so after 5 s, which would fail a request.
    """
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=LINE_BYTES,
    )
