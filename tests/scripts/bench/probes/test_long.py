"""Long prompts: what is timed, and the table of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from scripts.bench.probes import long


class Clock:
    """Time that passes by the engine's steps alone."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Engine:
    """Every step takes 5 ms, one with a new prompt as long as it is told to; all get a token."""

    def __init__(self, clock: Clock, prompt_ms: float) -> None:
        self._clock, self._prompt_ms = clock, prompt_ms
        self.left: dict[str, int] = {}
        self._new = False

    def add_request(self, name: str, prompt: Any, parameters: Any) -> None:
        self.left[name] = parameters.max_tokens
        self._new = True

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        self._clock.now += (self._prompt_ms if self._new else 5.0) / 1000
        self._new = False
        names = list(self.left)
        self.left = {name: count - 1 for name, count in self.left.items() if count > 1}
        return [SimpleNamespace(request_id=name) for name in names]


class Pool:
    def __init__(self) -> None:
        self.taken: list[int] = []

    def get_num_free_blocks(self) -> int:
        return 7

    def get_new_blocks(self, count: int) -> int:
        self.taken.append(count)
        return count

    def free_blocks(self, blocks: int) -> None:
        assert blocks == self.taken[-1]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, Any]], Pool]:
    clock, pool = Clock(), Pool()
    monkeypatch.setattr(long, "time", clock)
    monkeypatch.setattr(long, "say", lambda text: None)
    load = long.Load(Engine(clock, prompt_ms=40.0), pool, 1000)
    return long.play(load, [20, 30], repeats=2), pool


def test_a_first_token_and_the_longest_gap_beside_it_are_timed(
    played: tuple[list[dict[str, Any]], Pool],
) -> None:
    rows, pool = played
    assert [(row["tokens"], row["beside"]) for row in rows] == [
        (20, False), (30, False), (20, True), (30, True),
    ]  # fmt: skip
    for row in rows:
        for first, gap in [*row["gpu"], *row["cpu"]]:
            assert first == pytest.approx(40.0)
            assert gap == pytest.approx(40.0 if row["beside"] else 0.0)
    assert pool.taken == [7] * 8, "evicted before each prompt that is to come from CPU memory"


def test_the_table_has_a_line_for_each_figure(played: tuple[list[dict[str, Any]], Pool]) -> None:
    rows, _ = played
    lines = long.report({"ours": rows, "simple": rows}).splitlines()
    assert "| this tier | SimpleCPUOffloadConnector |" in " ".join(lines[0].split())
    said = [line.split("|")[1].strip() for line in lines[2:]]
    assert said == [
        "20 tokens, quiet: first token",
        "30 tokens, quiet: first token",
        "20 tokens, beside answers: first token",
        "20 tokens, beside answers: longest between tokens of others",
        "30 tokens, beside answers: first token",
        "30 tokens, beside answers: longest between tokens of others",
    ]
