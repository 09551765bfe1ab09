"""Runs the tests of each shape and feature on the installed vLLM, and writes docs/features.md.

    python scripts/matrix features                   # all rows, then the page
    python scripts/matrix features --select states   # only rows whose name has this; others stay
    python scripts/matrix features --release 0.30.0  # in an environment of that release (CPU)
    python scripts/matrix features --way v2          # of real engines, with runner V2; see the page
    python scripts/matrix features --page            # the page only, from the results
    python scripts/matrix features --check           # status 1 if it is not what this would write

Packages to test beside (NIXL, Ray) are installed in .neighbours when rows ask for them.

Results are in docs/measured/features.json, those of other releases in docs/measured/features, and
those with --way in docs/measured/features_ways:
for each row the tests that were run, with their outcomes, the release, the date and the commit. A
refusal is a verdict: its sentence is what the tier says. Status 1 if a test has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packaging.version import Version

from kvoffload_patch.integration.install import release_in_use
from scripts import ROOT
from scripts.matrix import (
    features_gpu,
    features_in_tree,
    features_releases,
    features_ways,
    features_when,
    neighbours,
    results,
)
from scripts.matrix.features_row import ENGINE, NOT_RUN, Row
from scripts.matrix.features_rows import MOVED, ROWS

FILE = ROOT / "docs" / "measured" / "features.json"
PAGE = ROOT / "docs" / "features.md"
TIMEOUT_S = 3000
# How most refusals end; of several of a row the last one says it.
_REMEDY = "set KVOFFLOAD_STRICT=0 to serve without the CPU tier"


def run(rows: list[Row], where: features_releases.Where) -> dict[str, dict[str, Any]]:
    """Run the tests of these rows; returns a result for each by its name."""
    asked = sorted({test for row in rows for test in row.tests})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [str(where.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *asked]
        # Known where tests of engines are asked for, and marked there.
        command += ["--features"] if any(test.startswith(ENGINE) for test in asked) else []
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1"]
        if asked:
            beside = (name for row in rows for name in row.beside)
            env = neighbours.environment(beside, where.python, where.env)
            subprocess.run(command, cwd=ROOT, env=env, timeout=TIMEOUT_S, check=False)
        cases = _cases(report) if report.exists() else []
    about = {**results.provenance(), "release": where.release}
    return {row.name: {**about, "tests": [c for c in cases if _is_of(c, row)]} for row in rows}


def _cases(report: Path) -> list[dict[str, str]]:
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        one = {"test": f"{case.get('file')}::{case.get('name')}", "outcome": "passed"}
        for kind in ("failure", "error", "skipped"):
            node = case.find(kind)
            if node is not None:
                one.update(outcome=kind, why=str(node.get("message")).splitlines()[0])
        for item in case.iter("property"):
            one[str(item.get("name"))] = str(item.get("value"))
        found.append(one)
    return found


def _is_of(case: dict[str, str], row: Row) -> bool:
    name = case["test"]
    return any(name == test or name.startswith((f"{test}[", f"{test}::")) for test in row.tests)


def verdict(row: Row, result: dict[str, Any] | None) -> str:
    """What a row's result comes to, in words; never empty."""
    if not row.tests:
        return "not shown: no test runs it"
    # Those that the row had when it was run, and has no more, say nothing of it.
    tests = [test for test in result["tests"] if _is_of(test, row)] if result else []
    if not tests:
        return f"{NOT_RUN} yet"
    outcomes = [test["outcome"] for test in tests]
    bad = next((test for test in tests if test["outcome"] in ("failure", "error")), None)
    if bad is not None:
        return f"**red**: {bad['why']}"
    if "passed" not in outcomes:
        return f"{NOT_RUN}: {tests[0]['why'].removeprefix('Skipped: ')}"
    refusals = list(dict.fromkeys(test["refusal"] for test in tests if "refusal" in test))
    if refusals:
        said = [one.removesuffix(f"; {_REMEDY}.") for one in refusals[:-1]]
        return f"refused: {' / '.join([*said, refusals[-1]])}"
    said = f"green: {outcomes.count('passed')} passed"
    left_out = [test["why"] for test in tests if test["outcome"] == "skipped"]
    if not left_out:
        return said
    return f"{said}, {len(left_out)} {NOT_RUN}: {left_out[0].removeprefix('Skipped: ')}"


def page(
    found: dict[str, dict[str, Any]],
    others: dict[str, dict[str, dict[str, Any]]] | None = None,
    gpu: list[dict[str, Any]] | None = None,
    ways: dict[str, dict[str, dict[str, Any]]] | None = None,
) -> str:
    """The text of docs/features.md.

    Args:
        found: results by row.
        others: by release, then by row.
        gpu: of `scripts/matrix gpu`, the newest release first.
        ways: by way, then by row.
    """
    lines = [
        "# Features",
        "",
        "Cache shapes, ways to run in parallel and neighbours: what was run of each, and what came",
        "out. `python scripts/matrix features` runs the tests and writes this page from",
        "[measured/features.json](measured/features.json); nothing here is written by hand. Tables",
        "further down are of a GPU and of other releases; [compatibility.md](compatibility.md) has",
        "every release.",
        "",
        "| Shape or feature | What was run | Release | Date | Verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in ROWS:
        cells = _cells(row, found, gpu or [])
        lines.append(f"| {row.name} | {row.what.removesuffix(': ')} | {' | '.join(cells)} |")
    lines += features_gpu.table(gpu or [])
    lines += features_in_tree.table()
    elsewhere = [row for row in ROWS if row.tests and not row.release]
    told = _told_of(others or {}, elsewhere, _on_another_release)
    lines += features_releases.table(told, others or {})
    in_ways = [row for row in ROWS if features_ways.is_played(row)]
    lines += features_ways.table(in_ways, _told_of(ways or {}, in_ways), ways or {})
    lines += _moved(found.get(MOVED)) + _padding(found.get(MOVED))
    lines += _lost(found, gpu or [])
    lines += features_when.changed(ROWS, _places(found, others or {}, ways or {}))
    return "\n".join(lines) + "\n"


def _places(
    found: dict[str, dict[str, Any]],
    others: dict[str, dict[str, dict[str, Any]]],
    ways: dict[str, dict[str, dict[str, Any]]],
) -> dict[str, dict[str, dict[str, Any]]]:
    """All results of rows, by the words of the table that has them."""
    of_ways = {head.lower(): ways.get(way, {}) for way, head in features_ways.WAYS.items()}
    return {"the first table": found, **others, **of_ways}


def _told_of(
    found: dict[str, dict[str, dict[str, Any]]],
    rows: list[Row],
    say: Callable[[Row, dict[str, Any] | None], str] = verdict,
) -> dict[str, dict[str, str]]:
    """By release, or by way, then by row: its verdict, in the words of ``say``."""
    return {
        where: {row.name: say(row, of.get(row.name)) for row in rows} for where, of in found.items()
    }


def _on_another_release(row: Row, result: dict[str, Any] | None) -> str:
    """The verdict, and of a row of one release where there is none yet, which one that is."""
    if row.only and result is None:
        return f"{NOT_RUN}: played on {row.only} alone"
    return verdict(row, result)


def _cells(
    row: Row, found: dict[str, dict[str, Any]], gpu: list[dict[str, Any]]
) -> tuple[str, str, str]:
    """Release, date and verdict of a row: of a GPU's where its tests could not be run here."""
    if row.gpu and not row.tests:
        return _on_a_gpu(row, gpu)
    here = _here(row, found)
    if row.gpu and here[2].startswith(NOT_RUN):
        release, date, said = _on_a_gpu(row, gpu)
        if not said.startswith(NOT_RUN):
            return release, date, f"{said}; here {here[2]}"
    return here


def _here(row: Row, found: dict[str, dict[str, Any]]) -> tuple[str, str, str]:
    """Release, date and verdict of a row's tests."""
    result = found.get(row.name)
    said = verdict(row, result)
    if result is None or said == f"{NOT_RUN} yet":
        return "none", "none", said
    return row.release or result["release"], result["date"], said


def _on_a_gpu(row: Row, gpu: list[dict[str, Any]]) -> tuple[str, str, str]:
    """The same of a row that is shown there alone: of the newest release on which it was played."""
    lines = features_gpu.lines(row, gpu)
    line = next((one for one in lines if not one.verdict.startswith(NOT_RUN)), lines[0])
    played = "" if line.verdict.startswith(NOT_RUN) else "on a GPU: "
    return line.release, line.date, f"{played}{line.verdict}"


def _moved(result: dict[str, Any] | None) -> list[str]:
    """A table of what hits move, by kinds of layers, beside full attention alone."""
    tests = result["tests"] if result else []
    rows = [json.loads(test["moved"]) for test in tests if "moved" in test]
    whole = {row["tokens"]: row["loaded"] for row in rows if row["shape"] == "full attention"}
    lines = [
        "",
        "## Bytes moved for a hit",
        "",
        "Models of two layers: full attention alone, and beside a layer that sees 128 tokens, or",
        "its chunk of 128. A page is what a layer keeps for the 16 tokens of a block. A prompt may",
        "end anywhere, so all pages are stored; a hit loads those that it needs.",
        f"`python scripts/matrix features --select '{MOVED}'` counts them again.",
        "",
        "| Tokens hit | Beside full attention | Pages stored | Pages loaded | Share |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: row["tokens"]):
        part = row["loaded"] / whole[row["tokens"]]
        beside = row["shape"].replace("full attention", "nothing")
        cells = f"{row['tokens']:,}", beside, row["stored"], row["loaded"], f"{part:.0%}"
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines if rows else []


def _padding(result: dict[str, Any] | None) -> list[str]:
    """A table of the part of a state's page that is padding, and of all that a hit moves."""
    tests = result["tests"] if result else []
    rows = [json.loads(test["padding"]) for test in tests if "padding" in test]
    lines = [
        "",
        "The page of a state is as large as one of attention, which vLLM gives as many tokens as",
        "that takes, a multiple of 16; the rest is padding. By vLLM's own sizes for published",
        "models, and of the bytes that a hit of 8,192 tokens moves, which has one state of each",
        "layer. Pages are copied whole: a block is the same bytes whatever group has it.",
        "",
        "| Model | Tokens of a block | Bytes of a page | Of these the state | Padding | Of a hit |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = row["model"], f"{row['tokens']:,}", f"{row['page']:,}", f"{row['state']:,}"
        shares = f"{1 - row['state'] / row['page']:.1%}", f"{row['of a hit']:.2%}"
        lines.append(f"| {' | '.join((*cells, *shares))} |")
    return lines if rows else []


def _lost(found: dict[str, dict[str, Any]], gpu: list[dict[str, Any]]) -> list[str]:
    """A table of how engines end that have lost one of two nodes, beside plain vLLM."""
    tests = [test for result in found.values() for test in result["tests"]]
    rows = [json.loads(test["lost"]) for test in tests if "lost" in test]
    rows += features_gpu.lost(gpu)
    lines = [
        "",
        "## A lost node",
        "",
        "An engine of two ranks, one on each node: tensor parallel, or two pipeline stages where",
        "that is said. All processes of the second node are killed at once, before a request or",
        "half a second into it: the error that it ends in, and how long after it came. On the CPU",
        "this does it again: `python scripts/matrix features --select 'nodes|Ray'`; on two GPUs",
        "`python scripts/matrix gpu --kinds 'a node lost' --out DIR`, where a step may take 60 s.",
        "",
        "| Executor | When | Plain vLLM | With the tier |",
        "| --- | --- | --- | --- |",
    ]
    when = {"node_lost": "between requests", "node_lost_at_work": "while it answers"}
    for row in rows:
        ends = [f"{end['error']}, {end['seconds']:.1f} s" for end in (row["plain"], row["tier"])]
        lines.append(f"| {row['executor']} | {when[row['when']]} | {' | '.join(ends)} |")
    return lines if rows else []


def load(file: Path = FILE) -> dict[str, dict[str, Any]]:
    """The results there are, by the name of their row."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def results_of(release: str) -> dict[str, dict[str, Any]]:
    """The results on one release, by row: those of the installed one may be of several."""
    found = load(features_releases.files().get(release, FILE))
    return {name: result for name, result in found.items() if result["release"] == release}


def main() -> int:
    """Run, and write results and page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--select", default="", help="rows whose name has this; A|B: either")
    parser.add_argument("--page", action="store_true", help="write the page only")
    parser.add_argument("--check", action="store_true", help="compare the page only")
    parser.add_argument("--way", choices=features_ways.WAYS, help="with what is turned off else")
    features_releases.add_arguments(parser)
    options = parser.parse_args()
    if options.check:
        return int(PAGE.read_text(encoding="utf-8") != whole_page())
    red: list[str] = []
    if not options.page:
        parts = options.select.split("|")
        chosen = [row for row in ROWS if row.tests and any(part in row.name for part in parts)]
        with features_releases.where(options, str(Version(release_in_use()))) as where:
            if where.file:  # of another release, where these would say the same
                chosen = [row for row in chosen if not row.release]
            if options.way:
                chosen = [row for row in chosen if features_ways.is_played(row)]
                env = {**(where.env or os.environ), "TEST_WAY": options.way}
                where = where._replace(env=env, file=features_ways.file(options.way))
            red = _play(chosen, where)
    PAGE.write_text(whole_page(), encoding="utf-8")
    print(f"{len(ROWS)} rows" + (f"; red: {red}" if red else ""))
    return int(bool(red))


def _play(rows: list[Row], where: features_releases.Where) -> list[str]:
    """Run them and write their results; which rows of the file are red."""
    file = where.file or FILE
    played = run(rows, where)
    found = {**load(file), **played}  # what others have written meanwhile as well
    text = json.dumps({row.name: found[row.name] for row in ROWS if row.name in found}, indent=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n", encoding="utf-8")
    return [row.name for row in ROWS if verdict(row, found.get(row.name)).startswith("**red")]


def whole_page() -> str:
    """The page of all results there are."""
    files = features_releases.files()
    others = {release: load(file) for release, file in files.items()}
    ways = {way: load(features_ways.file(way)) for way in features_ways.WAYS}
    return page(load(), others, features_gpu.load(), ways)
