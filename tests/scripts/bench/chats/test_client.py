"""The client of `bench chats`, against a server that streams what it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from scripts.bench.chats import client

pytest.importorskip("aiohttp")


def line(**values: Any) -> bytes:
    return b"data: " + json.dumps(values).encode() + b"\n\n"


def token(*tokens: int, **more: Any) -> bytes:
    return line(choices=[{"text": "", "token_ids": list(tokens), **more}])


USAGE = line(choices=[], usage={"prompt_tokens_details": {"cached_tokens": 16}})
DONE = b"data: [DONE]\n\n"


def served(
    method: str, path: str, answer: Callable[[Any], Any], use: Callable[[Any, str], Any]
) -> Any:
    """What ``use`` gives of a session and the address of a server that answers so."""
    from aiohttp import web

    async def run() -> Any:
        app = web.Application()
        app.router.add_route(method, path, answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            async with client.session() as session:
                return await use(session, f"http://{host}:{port}")
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def asked(chunks: list[bytes | float], answer: int, status: int = 200) -> tuple[Any, Any]:
    """The answer, and what the server was sent; a number waits."""
    from aiohttp import web

    seen: dict[str, Any] = {}

    async def complete(request: web.Request) -> web.StreamResponse:
        seen.update(await request.json(), name=request.headers["X-Request-Id"])
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for chunk in chunks:
            if isinstance(chunk, float):
                await asyncio.sleep(chunk)
            else:
                await response.write(chunk)
        return response

    def ask(session: Any, url: str) -> Any:
        return client.ask(session, url, "r", [7, 8, 9], answer)

    return served("POST", "/v1/completions", complete, ask), seen


def test_the_tiers_samples_are_taken_without_vllms_labels() -> None:
    from aiohttp import web

    text = """# HELP kvoffload_copies_total Copies.
kvoffload_copies_total{direction="load",engine="0",model_name="m"} 3.0
kvoffload_copy_seconds_bucket{engine="0",le="0.001",model_name="m"} 2.0
kvoffload_used_blocks{engine="0",model_name="m"} 7.0
vllm:num_requests_running{engine="0",model_name="m"} 1.0
"""

    async def metrics(_: Any) -> web.Response:
        return web.Response(text=text)

    found = served("GET", "/metrics", metrics, client.counted)
    assert found == {'kvoffload_copies_total{direction="load"}': 3, "kvoffload_used_blocks": 7}


def test_tokens_are_taken_with_the_time_of_their_chunk() -> None:
    first = token(4, prompt_token_ids=list(range(100_000)))  # longer than aiohttp's own limit
    metrics = line(choices=[], usage={"prompt_tokens_details": None}, metrics={"queue_ms": 1.5})
    made, seen = asked([first, 0.05, b": ping\n\n", token(5, 6), USAGE, metrics, DONE], 3)
    assert made.tokens == [4, 5, 6] and made.prompt == 3
    assert made.sent < made.at[0] < made.at[1] == made.at[2]
    assert made.first < made.whole and made.gaps[0] > 0 and made.gaps[1] == 0
    assert made.engine == {"queue_ms": 1.5}
    assert seen["prompt"] == [7, 8, 9] and seen["max_tokens"] == 3 and seen["name"] == "r"
    assert seen["stream"] and seen["ignore_eos"] and seen["temperature"] == 0


def test_cached_tokens_are_those_of_the_last_chunk() -> None:
    made, _ = asked([token(4), USAGE, DONE], 1)
    assert made.cached == 16


@pytest.mark.parametrize(
    ("chunks", "status", "words"),
    [
        ([token(4), DONE], 200, "expected 2 tokens, found 1"),
        ([token(4), line(error={"message": "no"}), DONE], 200, "expected tokens, found .*no"),
        ([b"too long"], 400, "expected status 200, found 400: too long"),
    ],
)
def test_anything_but_a_whole_answer_raises(chunks: Any, status: int, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        asked(chunks, 2, status)
