"""The load, and what is made of a server's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli.bench.test_server import serve

from kvoffload_patch.cli.bench import load as loads
from kvoffload_patch.cli.bench.errors import ServerFailed
from kvoffload_patch.cli.bench.load import Answer, Load

SMALL = Load(history=40, new=5, answer=3, turns=3, at_once=2, seed=7)


def test_each_prompt_begins_with_the_one_before_and_chats_share_nothing() -> None:
    first, second, third = SMALL.prompts(0)
    assert (len(first), len(second), len(third)) == (40, 48, 56)
    assert third[:48] == second and second[:40] == first
    assert SMALL.longest == len(third) + SMALL.answer
    assert SMALL.prompts(0) == [first, second, third], "the same each time"
    assert SMALL.prompts(1)[0][:8] != first[:8]


@pytest.mark.parametrize(("gpu", "chats"), [(40, 2), (41, 3), (400, 20), (1, 2)])
def test_chats_are_twice_what_the_gpu_holds(gpu: int, chats: int) -> None:
    assert SMALL.chats_for(gpu) == chats


def test_a_server_is_asked_turn_by_turn(tmp_path: Path) -> None:
    with serve(tmp_path, "--max-model-len", "64") as server:
        found = loads.play(server, SMALL, 4)
    first, later = found["first"], found["later"]
    assert (first["requests"], later["requests"]) == (4, 8)
    assert (first["prompt_tokens"], later["prompt_tokens"]) == (160, 4 * (48 + 56))
    assert (first["found_tokens"], later["found_tokens"]) == (0, 4 * (40 + 48))
    assert 0 < later["first_token_ms"]["p50"] <= later["first_token_ms"]["p99"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--max-model-len", "9", "--refuse"], "answered with status 400: too long"),
        (["--max-model-len", "70"], "answered with status 400"),
    ],
)
def test_a_request_that_fails_ends_the_mode(tmp_path: Path, more: list[str], said: str) -> None:
    load = Load(history=64, new=5, answer=3, turns=2, at_once=2, seed=7)
    with serve(tmp_path, *more) as server, pytest.raises(ServerFailed, match=said) as caught:
        loads.play(server, load, 2)
    assert "its log ends with:" in str(caught.value)


def test_an_answer_of_another_length_or_none_is_a_failure(tmp_path: Path) -> None:
    with serve(tmp_path, "--max-model-len", "64") as server:
        lines: Any = [b'data: {"choices": [{}]}', b"data: [DONE]"]
        with pytest.raises(ServerFailed, match="expected 4 tokens, found an answer without end"):
            loads._read(lines, server, 9, 4, 0.0)
    with pytest.raises(ServerFailed, match="a request failed with ConnectionRefusedError"):
        loads.ask(server, "fake", [10], 2)


def test_figures_are_milliseconds() -> None:
    answers = [Answer(100, 50, first / 1000, 0.002) for first in range(1, 101)]
    found = loads.figures(answers, 1.5)
    assert found == {
        "requests": 100, "seconds": 1.5, "prompt_tokens": 10_000, "found_tokens": 5_000,
        "first_token_ms": {"p50": 50.0, "p99": 99.0}, "output_token_ms": {"p50": 2.0, "p99": 2.0},
    }  # fmt: skip
