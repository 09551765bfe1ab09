"""Rows of docs/features.md on a GPU: what `scripts/matrix gpu` has left in docs/measured/matrix.

Each row names the kinds of engines of `tests/engine/gpu_kinds.py` that show it. A line of the table
is a row on one release: results of several commits may be in one file, so each has its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from scripts.matrix import features_refused, results
from scripts.matrix.features_row import NOT_RUN, Row
from scripts.matrix.features_rows import ROWS
from scripts.matrix.features_when import dates

REFUSED = "refused by default"  # as a verdict has it


class Line(NamedTuple):
    """What was run of a row on one release, and what came out; no field is empty."""

    what: str
    release: str
    date: str
    commit: str
    device: str
    verdict: str


def _none(row: Row) -> Line:
    needed = "a GPU" if row.gpus == 1 else f"{row.gpus} GPUs"
    return Line("none", "none", "none", "none", "none", f"{NOT_RUN}: needs {needed}")


def load(folder: Path = results.FOLDER) -> list[dict[str, Any]]:
    """The results there are, the newest release first."""
    found = [json.loads(f.read_text(encoding="utf-8")) for f in folder.glob("gpu-*.json")]
    return sorted(found, key=lambda result: Version(result["release"]), reverse=True)


def lines(row: Row, found: list[dict[str, Any]]) -> list[Line]:
    """Of a row, one for each release on which a kind of it was run; at least one."""
    return [line for result in found if (line := _line(row, result))] or [_none(row)]


def _line(row: Row, result: dict[str, Any]) -> Line | None:
    device = {"device": result["device"]}
    of_row = [test for test in result["tests"] if _is_of(test["name"], row)]
    tests = [{**device, **results.dated(result, test)} for test in of_row]
    if not tests:
        return None
    played = [test for test in tests if test["outcome"] != "skipped"] or tests
    told = {
        field: ", ".join(sorted({test[field] for test in played})) for field in ("commit", "device")
    }
    return Line(
        what="; ".join(_kinds([test["name"] for test in played])),
        release=result["release"],
        date=dates(played),
        commit=told["commit"],
        device=told["device"],
        verdict=_verdict(tests, result["release"]),
    )


def lost(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How engines end that have lost one of two nodes, with the runner and the device."""
    return [
        {**ends, "executor": f"{ends['executor']}, runner {runner.upper()}, {device}"}
        for result in found
        for test in result["tests"]
        if (ends := test.get("lost"))
        for runner, device in [(test["name"].partition(", ")[0], {**result, **test}["device"])]
    ]


def _is_of(name: str, row: Row) -> bool:
    runner, _, kind = name.partition(", ")
    return kind in row.gpu or runner in row.gpu


def _kinds(names: list[str]) -> list[str]:
    """Each kind once, with the runners that it was run with."""
    runners: dict[str, list[str]] = {}
    for name in names:
        runner, _, kind = name.partition(", ")
        runners.setdefault(kind, []).append(runner.upper())
    return [f"{kind} ({', '.join(sorted(of))})" for kind, of in runners.items()]


def _verdict(tests: list[dict[str, Any]], release: str) -> str:
    """In words; of what was played it says what a start without further settings refuses."""
    bad = [test for test in tests if test["outcome"] not in ("passed", "skipped")]
    if bad:
        return f"**red**: {bad[0]['name']} {bad[0]['outcome']}"
    passed = [test for test in tests if test["outcome"] == "passed"]
    left_out = [test for test in tests if test["outcome"] == "skipped"]
    if not passed:
        return f"{NOT_RUN}: {left_out[0]['why']}"
    answers, equal, blocks = (
        sum(test[field] for test in passed)
        for field in ("answers", "answers_equal", "blocks_loaded")
    )
    said = f"green: {equal:,} of {answers:,} answers equal, {blocks:,} blocks loaded"
    beside = [*_refused(passed, release), *(f"{test['name']} {NOT_RUN}" for test in left_out)]
    return "; ".join([said, *beside])


def _refused(played: list[dict[str, Any]], release: str) -> list[str]:
    """Each by its name, or all in one word."""
    names = [test["name"] for test in played]
    refused = [name for name in names if features_refused.is_refused(name, release)]
    if refused == names:
        return [REFUSED]
    return [f"{name} {REFUSED}" for name in refused]


def table(found: list[dict[str, Any]]) -> list[str]:
    """A line for each row that has kinds of engines, and each release."""
    shown = [
        "",
        "## On a GPU",
        "",
        "`python scripts/matrix gpu --out DIR` plays real engines on a GPU, with the tier and",
        "without ([compatibility.md](compatibility.md)); V1 and V2 are vLLM's model runners. A row",
        "that is not here has no such run. Kinds with states, and with prompts that ranks divide,",
        "are played with KVOFFLOAD_ALLOW_UNVERIFIED=1; where a start without it refuses them, the",
        f'verdict says "{REFUSED}".',
        "",
        "| Shape or feature | Kinds of engines | Release | Date | Commit | Device | Verdict |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in ROWS:
        for line in lines(row, found) if row.gpu else []:
            shown.append(f"| {row.name} | {' | '.join(line)} |")
    return shown
