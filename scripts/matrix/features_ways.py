"""Rows of docs/features.md run again with what vLLM's CPU platform turns off.

`tests/engine/ways.py` has the ways, and says of each engine what it did. Results are in
docs/measured/features_ways, a file for each way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.matrix.features_row import ENGINE, Row
from scripts.matrix.features_when import dates

FOLDER = ROOT / "docs" / "measured" / "features_ways"
# What `--way` can name, and the head of its column.
WAYS = {"asynchronous": "Asynchronous scheduling", "v2": "Runner V2"}
# What an engine has to have done to be counted there, as `ways.note` has it.
DONE = {"asynchronous": ("asynchronous",), "v2": ("v2",)}
# Rows that are about one way themselves.
_THEMSELVES = ("asynchronous scheduling", "model runner V1", "model runner V2")
INTRODUCTION = """
## With asynchronous scheduling, and with runner V2

vLLM's CPU platform turns asynchronous scheduling off, whatever vLLM itself has decided, and its
CPU build refuses model runner V2 for want of a Triton for the CPU. So the runs above are without
both, but for rows that say otherwise. Here the same tests were run with what vLLM had decided,
and with runner V2, whose kernels Triton's interpreter runs; plain vLLM, which they compare with,
likewise. Engines with the tier are counted that did it, of all in a row's tests; one that tests
share is counted for each.
`python scripts/matrix features --way asynchronous`, and `--way v2`, run them again.
"""


def file(way: str) -> Path:
    """Where the results of a way are."""
    return FOLDER / f"{way}.json"


def is_played(row: Row) -> bool:
    """Whether a row is run in ways: one of real engines, and not about a way itself."""
    return row.name not in _THEMSELVES and any(test.startswith(ENGINE) for test in row.tests)


def table(
    rows: list[Row], verdicts: dict[str, dict[str, str]], found: dict[str, dict[str, Any]]
) -> list[str]:
    """The lines of the page.

    Args:
        rows: those to tell of.
        verdicts: by way, then by row: what `features.verdict` says.
        found: the results that they come from, by way, then by row.
    """
    if not any(found.values()):
        return []
    heads = [f"{head}{_when(found.get(way, {}))}" for way, head in WAYS.items()]
    lines = [
        *INTRODUCTION.splitlines(),
        "",
        f"| Shape or feature | {' | '.join(heads)} |",
        f"| --- |{' --- |' * len(heads)}",
    ]
    for row in rows:
        cells = [_cell(way, verdicts[way][row.name], found[way].get(row.name)) for way in WAYS]
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return lines


def _when(of: dict[str, Any]) -> str:
    """Which releases, and the first and the last date."""
    if not of:
        return ""
    releases = sorted({result["release"] for result in of.values()})
    return f", {', '.join(releases)}, {dates(of.values())}"


def _cell(way: str, verdict: str, result: dict[str, Any] | None) -> str:
    """The verdict, how many engines did it, and what vLLM says where one did not."""
    tests = result["tests"] if result else []
    seen = [engine for test in tests for engine in json.loads(test.get("ways", "[]"))]
    if not seen:
        return verdict
    did = sum(all(engine[what] for what in DONE[way]) for engine in seen)
    why = sorted({engine["why"] for engine in seen if "why" in engine and not engine[way]})
    said = f" ({'; '.join(one.rstrip('. ') for one in why)})" if why else ""
    return f"{verdict}; {did} of {len(seen)} engines{said}"
