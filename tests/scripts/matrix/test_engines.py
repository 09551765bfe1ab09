"""What `matrix engines` makes of a release's tests; it runs for minutes itself."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from scripts.matrix import engines, environment, results

GOOD = {
    "kind": "cpu-engine",
    "release": "0.19.1",
    "seconds": 90,
    "pytest_status": 0,
    "tests": [
        {"name": "a", "outcome": "passed"},
        {"name": "b", "outcome": "skipped", "why": "vLLM 0.19.1 has no b"},
    ],
    "tokens_compared": 10,
    "tokens_equal": 10,
    "tokens_loaded": 128,
}


def test_a_run_in_which_all_is_well_is_green():
    assert engines.verdict(GOOD) == "green"
    assert "skipped: b: vLLM 0.19.1 has no b" in engines.summary(GOOD | {"verdict": "green"})


@pytest.mark.parametrize(
    "change",
    [
        {"pytest_status": 1},
        {"tests": []},
        {"tests": [{"name": "b", "outcome": "skipped", "why": "all"}]},
        {"tests": [*GOOD["tests"], {"name": "c", "outcome": "failed", "why": "E   no"}]},
        {"tokens_equal": 9},
        {"tokens_compared": 0, "tokens_equal": 0},
        {"tokens_loaded": 0},
    ],
    ids=lambda change: ",".join(change),
)
def test_anything_less_is_red(change):
    assert engines.verdict({**GOOD, **change}) == "red"


def test_a_served_engine_is_green_by_its_tests_alone():
    served = {**GOOD, "kind": "served-engine", "tokens_compared": 0, "tokens_equal": 0}
    served["tokens_loaded"] = 0
    assert engines.verdict(served) == "green"
    assert engines.verdict({**served, "pytest_status": 1}) == "red"
    assert engines.verdict({**served, "kind": "cpu-engine"}) == "red"


def test_what_was_run_alone_goes_to_the_file_of_all_where_there_is_one(tmp_path):
    def kind(only: str | None, release: str) -> str:
        return engines.kind_of(release, argparse.Namespace(only=only, out=tmp_path))

    results.write(tmp_path, {**GOOD, "kind": "cpu-engine"})
    assert kind("serving", "0.19.1") == kind(None, "0.19.0") == "cpu-engine"
    assert kind("serving", "0.19.0") == "served-engine"
    for expression in engines.ONLY.values():
        file = Path(__file__).parents[2] / "engine" / f"{expression}.py"
        assert "pytest.mark.matrix" in file.read_text(encoding="utf-8")


def test_a_release_without_an_environment_is_red():
    assert engines.verdict({"release": "0.9.2", "why": "`uv` failed"}) == "red"


def test_a_part_that_is_well_leaves_the_file_of_all_green_and_one_that_is_not_makes_it_red(
    tmp_path,
):
    whole = {**GOOD, "kind": "cpu-engine", "date": "1", "commit": "old", "verdict": "green"}
    file = tmp_path / "cpu-0.19.1.json"
    results.write(tmp_path, whole)
    none = {"tokens_compared": 0, "tokens_equal": 0, "tokens_loaded": 0}
    for outcome, status, verdict in (("failed", 1, "red"), ("passed", 0, "green")):
        tests = [{"name": "s", "outcome": outcome, "why": "E   no"}]
        part = {**whole, **none, "tests": tests, "pytest_status": status, "commit": "new"}
        engines.record(part, tmp_path, part=True)
        kept = json.loads(file.read_text())
        assert (part["verdict"], kept["verdict"]) == (verdict, verdict)
        assert [test["name"] for test in kept["tests"]] == ["a", "b", "s"]


def test_a_part_that_could_not_be_run_leaves_the_file_as_it_is(tmp_path):
    whole = {**GOOD, "kind": "cpu-engine", "date": "1", "commit": "old", "verdict": "green"}
    text = results.write(tmp_path, whole)
    part = {"kind": "cpu-engine", "release": "0.19.1", "why": "`uv` failed"}
    engines.record(part, tmp_path, part=True)
    assert part["verdict"] == "red"
    assert (tmp_path / "cpu-0.19.1.json").read_text() == text


def test_without_an_environment_the_file_of_an_earlier_run_stays(tmp_path, monkeypatch):
    def unmade(*_: object) -> None:
        raise environment.NotMade("expected `uv` on the PATH, found none; pip install uv.")

    text = results.write(tmp_path, GOOD | {"verdict": "green"})
    monkeypatch.setattr(environment, "make", unmade)
    options = argparse.Namespace(out=tmp_path, work=tmp_path, keep=False, only=None, select=None)
    played = engines.run_release(GOOD["release"], options)
    assert played["verdict"] == "red" and "uv" in played["why"]
    assert [file.read_text() for file in tmp_path.iterdir()] == [text]
