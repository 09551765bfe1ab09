"""Rows of docs/features.md run with what vLLM's CPU platform turns off: what is said of them."""

from __future__ import annotations

import json

import pytest
from engine import ways

from scripts.matrix import features, features_releases, features_ways
from scripts.matrix.features_row import Row
from scripts.matrix.features_rows import ROWS

PLAYED = [row for row in ROWS if features_ways.is_played(row)]
ROW = PLAYED[0]


def result(*engines: dict[str, object], outcome: str = "passed") -> dict[str, object]:
    """Of one row, with a test that has started these engines."""
    test = {"test": ROW.tests[0], "outcome": outcome, "why": "no", "ways": json.dumps(engines)}
    return {"release": "0.32.0", "date": "2026-11-24", "commit": "abc", "tests": [test]}


def cell(way: str, found: dict[str, object]) -> str:
    """What the page says of a row in one way."""
    text = features.page(
        {}, ways={one: {} for one in features_ways.WAYS} | {way: {ROW.name: found}}
    )
    text = text.partition("## With asynchronous")[2]
    (line,) = [one for one in text.splitlines() if one.startswith(f"| {ROW.name} |")]
    return line.split(" | ")[list(features_ways.WAYS).index(way) + 1].strip(" |")


def test_the_engines_that_did_it_are_counted() -> None:
    both, neither = (
        {"asynchronous": True, "v2": True},
        {"asynchronous": False, "v2": False, "why": "it is disabled."},
    )
    assert cell("v2", result(both, both)) == "green: 1 passed; 2 of 2 engines"
    said = "green: 1 passed; 1 of 2 engines (it is disabled)"
    assert cell("asynchronous", result(both, neither)) == said
    assert cell("v2", result(neither)).startswith("green: 1 passed; 0 of 1 engines")
    assert cell("v2", result(both, outcome="failure")).startswith("**red**: no; 1 of 1")


def test_a_row_without_a_result_is_not_run_yet() -> None:
    text = features.page({}, ways={"v2": {ROW.name: result()}, "asynchronous": {}})
    assert f"| {PLAYED[1].name} | not run yet | not run yet |" in text
    assert "## With asynchronous" not in features.page({})


def test_what_is_run_are_real_engines_whose_results_have_a_file_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[list[Row], features_releases.Where]] = []

    def play(rows: list[Row], where: features_releases.Where) -> list[str]:
        asked.append((rows, where))
        return []

    class NoPage:
        @staticmethod
        def write_text(text: str, encoding: str) -> None:
            """The page stays as it is."""

    monkeypatch.setattr(features, "_play", play)
    monkeypatch.setattr(features, "PAGE", NoPage)
    monkeypatch.setattr(features, "release_in_use", lambda: "0.32.0")
    monkeypatch.setattr("sys.argv", ["features", "--way", "v2"])
    assert features.main() == 0
    ((rows, where),) = asked
    assert rows == PLAYED and where.file == features_ways.file("v2")
    assert where.env is not None and where.env["TEST_WAY"] == "v2"
    names = {row.name for row in rows}
    assert "two tensor-parallel ranks" in names and "asynchronous scheduling" not in names


def test_an_engine_is_noted_once_and_says_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_WAY", "v2")
    assert ways.environment()["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    ways.taken()
    refused = "WARNING Async scheduling not supported with x and will be disabled."
    for log in ("scheduling as vLLM has decided, asynchronous: True", refused, refused):
        ways.note(log)
    first, second = ways.taken()
    assert first == {"asynchronous": True, "v2": False}
    assert not second["asynchronous"] and "Async scheduling not supported" in second["why"]
    assert ways.taken() == []
    monkeypatch.delenv("TEST_WAY")
    assert ways.environment() == {}
