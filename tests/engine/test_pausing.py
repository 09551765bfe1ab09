"""vLLM's own /pause, /resume and /sleep on a server with the tier, over HTTP, beside plain vLLM."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine import release
from engine.model import write_model
from engine.server import Server
from engine.test_serving import BLOCK, FULL, PROMPT_TOKENS, SMALL, prompts

from kvoffload_patch.cli.bench.server import HOST
from kvoffload_patch.control import client

pytestmark = pytest.mark.skipif(
    not release.resets_when_it_sleeps(), reason="up to 0.16 a server pauses otherwise"
)

# What is asked while a server is paused has to wait; so has what it was about to answer.
LONG = 64
KEEPING = {
    "wait": "/pause?mode=wait&clear_cache=false",
    "keep": "/pause?mode=keep&clear_cache=false",
    "level 0": "/sleep?level=0&mode=keep",
}
RESUME = {"level 0": "/wake_up"}


def post(server: Server, path: str) -> None:
    connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
    try:
        connection.request("POST", path)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
    finally:
        connection.close()


def texts(server: Server, asked: list[list[int]], count: int = 4) -> list[str]:
    return [server.ask(prompt, count)["choices"][0]["text"] for prompt in asked]


@contextmanager
def paused(server: Server, kind: str, asked: list[list[int]]) -> Iterator[list[Future[Any]]]:
    """While it is entered, the server is paused; requests from before and meanwhile."""
    with ThreadPoolExecutor() as others:
        before = [others.submit(texts, server, [one], LONG) for one in asked[:2]]
        post(server, KEEPING[kind])
        meanwhile = [others.submit(texts, server, [one], LONG) for one in asked[2:]]
        yield before + meanwhile
        assert not any(one.done() for one in meanwhile), "it was not paused"
        post(server, RESUME.get(kind, "/resume"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("paused"))


def test_a_pause_keeps_the_tier_and_one_that_clears_the_cache_empties_it(
    real: Any, model: Path, tmp_path: Path
) -> None:
    asked = prompts(5, 4)
    runtime = {
        "XDG_RUNTIME_DIR": str(tmp_path), "KVOFFLOAD_CONTROL": "1", "VLLM_SERVER_DEV_MODE": "1",
    }  # fmt: skip
    with Server(model, tmp_path / "plain", SMALL, None, real.warm) as plain:
        short, long = texts(plain, asked), texts(plain, asked, LONG)
    with Server(model, tmp_path / "log", SMALL, runtime, real.warm) as server:
        folder = tmp_path / "kvoffload"
        (engine,) = [one for one in client.find(runtime) if one.path.parent == folder]

        def told(command: str, **arguments: str) -> dict[str, Any]:
            return dict(client.ask(engine, command, **arguments))

        def hit_and_computed() -> tuple[int, int]:
            status = told("status")
            return status["hit_tokens"], status["queried_tokens"] - status["hit_tokens"]

        assert texts(server, asked) == short
        held = told("status")["used_blocks"]
        assert held >= len(asked) * FULL // BLOCK
        for kind in KEEPING:
            with paused(server, kind, asked) as requests:
                assert told("status")["used_blocks"] >= held
                assert told("set", log_interval="9")["settings"]["log_interval"] == 9
            assert [one.result(60)[0] for one in requests] == long, kind
            hit, computed = hit_and_computed()
            assert texts(server, asked) == short
            # The order in which requests end decides which blocks are left on the GPU as well.
            assert hit_and_computed()[1] - computed == len(asked) * (PROMPT_TOKENS - FULL), kind
            assert hit_and_computed()[0] - hit > 2 * FULL, kind
        post(server, "/pause")
        assert told("status")["used_blocks"] == 0, "vLLM has forgotten its cache"
        post(server, "/resume")
        hit = told("status")["hit_tokens"]
        assert texts(server, asked) == short
        assert told("status")["hit_tokens"] == hit
