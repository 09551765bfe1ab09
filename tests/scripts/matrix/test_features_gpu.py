"""Rows of docs/features.md on a GPU: which kinds of engines show them, and what is said of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from engine import gpu_kinds
from packaging.version import Version

from scripts import ROOT
from scripts.matrix import features, features_gpu, features_releases
from scripts.matrix.features_row import Row
from scripts.matrix.features_rows import ROWS

ROW = Row("a shape", "nothing on the CPU", gpu=("graphs", "graphs, windows"))


def result(*tests: dict[str, Any], release: str = "0.26.0") -> dict[str, Any]:
    """Of one release; each test has passed unless it says otherwise."""
    counted = {"answers": 36, "answers_equal": 36, "blocks_loaded": 1000, "outcome": "passed"}
    head = {"release": release, "date": "2026-11-23", "commit": "new", "device": "a GPU"}
    return {**head, "tests": [{**counted, **test} for test in tests]}


def test_every_kind_of_engine_shows_a_row_and_every_row_names_kinds_that_are_there() -> None:
    named = {name for row in ROWS for name in row.gpu}
    assert named == {kind.name for kind in gpu_kinds.KINDS} | {"v1", "v2"}


def test_a_row_says_how_many_gpus_its_kinds_take() -> None:
    taken = {kind.name: kind.gpus for kind in gpu_kinds.KINDS} | {"v1": 1, "v2": 1}
    for row in ROWS:
        assert {taken[name] for name in row.gpu} <= {row.gpus}, row.name


def test_a_row_adds_up_its_kinds_and_names_each_commit() -> None:
    found = result(
        {"name": "v1, graphs"},
        {"name": "v2, graphs"},
        {"name": "v1, graphs, windows", "date": "2026-11-20", "commit": "old", "device": "b"},
        {"name": "v1, mla"},
    )
    (line,) = features_gpu.lines(ROW, [found])
    assert line == features_gpu.Line(
        "graphs (V1, V2); graphs, windows (V1)",
        "0.26.0",
        "2026-11-20 to 2026-11-23",
        "new, old",
        "a GPU, b",
        "green: 108 of 108 answers equal, 3,000 blocks loaded",
    )
    (of_a_runner,) = features_gpu.lines(Row("V2", "", gpu=("v2",)), [found])
    assert of_a_runner.what == "graphs (V2)"


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ([{"outcome": "failed"}, {}], "**red**: v1, graphs failed"),
        ([{"outcome": "skipped", "why": "no room"}], "not run: no room"),
        (
            [{}, {"name": "v1, graphs, windows", "outcome": "skipped", "why": "no room"}],
            "green: 36 of 36 answers equal, 1,000 blocks loaded; v1, graphs, windows not run",
        ),
    ],
)
def test_a_verdict_says_what_came_out(tests: list[dict[str, str]], said: str) -> None:
    (line,) = features_gpu.lines(ROW, [result(*({"name": "v1, graphs", **one} for one in tests))])
    assert line.verdict == said
    assert "windows" not in line.what, "it was not run"


def test_each_release_has_a_line_and_a_row_without_a_run_says_so() -> None:
    newer, older = result({"name": "v1, graphs"}), result({"name": "v1, graphs"}, release="0.9.2")
    assert [line.release for line in features_gpu.lines(ROW, [newer, older])] == ["0.26.0", "0.9.2"]
    (none,) = features_gpu.lines(ROW, [result({"name": "v1, mla"})])
    assert all(none) and none.verdict == "not run: needs a GPU"
    (none,) = features_gpu.lines(ROW._replace(gpus=2), [result({"name": "v1, mla"})])
    assert none.verdict == "not run: needs 2 GPUs"


def test_a_row_that_only_a_gpu_shows_has_its_verdict_in_the_first_table() -> None:
    mla = next(row for row in ROWS if row.name == "MLA")
    text = features.page({}, gpu=[result({"name": "v1, mla"})])
    green = "green: 36 of 36 answers equal, 1,000 blocks loaded"
    assert f"| MLA | {mla.what} | 0.26.0 | 2026-11-23 | on a GPU: {green} |" in text
    assert f"| MLA | mla (V1) | 0.26.0 | 2026-11-23 | new | a GPU | {green} |" in text
    assert f"| MLA | {mla.what} | none | none | not run: needs a GPU |" in features.page({})


def test_a_row_that_is_left_out_on_the_newest_release_has_the_verdict_of_another() -> None:
    row = next(row for row in ROWS if row.name == "LMCache")
    skipped = {"name": f"v1, {row.gpu[0]}", "outcome": "skipped", "why": "wrong by itself"}
    begin = f"| LMCache | {row.what} |"
    for outcome, said in (("passed", "green"), ("failed", "**red**")):
        older = result({"name": f"v1, {row.gpu[0]}", "outcome": outcome}, release="0.25.1")
        text = features.page({}, gpu=[result(skipped), older])
        assert f"{begin} 0.25.1 | 2026-11-23 | on a GPU: {said}" in text
    text = features.page({}, gpu=[result(skipped), result(skipped, release="0.25.1")])
    assert f"{begin} 0.26.0 | 2026-11-23 | not run: wrong by itself |" in text


def test_a_row_whose_tests_cannot_be_run_here_has_the_verdict_of_a_gpu() -> None:
    name = "expert parallelism with a fixed set of ranks"
    row = next(row for row in ROWS if row.name == name)
    skipped = {"outcome": "skipped", "why": "Skipped: plain vLLM ends", "test": row.tests[0]}
    here = {"release": "0.32.0", "date": "2026-11-22", "tests": [skipped]}
    begin = f"| {name} | {row.what} |"
    assert f"{begin} 0.32.0 | 2026-11-22 | not run: plain vLLM ends |" in features.page(
        {name: here}
    )
    text = features.page({name: here}, gpu=[result({"name": f"v1, {row.gpu[0]}"})])
    green = "on a GPU: green: 36 of 36 answers equal, 1,000 blocks loaded"
    assert f"{begin} 0.26.0 | 2026-11-23 | {green}; here not run: plain vLLM ends |" in text
    passed = {**here, "tests": [{**skipped, "outcome": "passed"}]}
    text = features.page({name: passed}, gpu=[result({"name": f"v1, {row.gpu[0]}"})])
    assert f"{begin} 0.32.0 | 2026-11-22 | green: 1 passed |" in text


def test_no_cell_of_the_table_is_empty() -> None:
    table = [line for line in features_gpu.table([]) if line.startswith("| ")][2:]
    assert len(table) == sum(bool(row.gpu) for row in ROWS)
    for line in table:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 7 and all(cells), line


def test_the_newest_release_is_first_and_its_steps_were_asynchronous() -> None:
    found = features_gpu.load()
    releases = [[int(n) for n in one["release"].split(".")] for one in found]
    assert releases == sorted(releases, reverse=True) and len(releases) > 1
    (row,) = [row for row in ROWS if row.name == "asynchronous scheduling"]
    told = [t for one in found for t in one["tests"] if features_gpu._is_of(t["name"], row)]
    assert told and {test["scheduler"] for test in told} == {"AsyncScheduler"}


@pytest.mark.parametrize(
    ("begin", "end", "row"),
    [
        ("on two GPUs with ", ", on four", "decode context parallelism (DCP)"),
        ("other than two of one rank with ", ". Two stages", "two pipeline stages"),
        ("on a GPU other than with ", ". On the CPU", "sleep"),
    ],
)
def test_limits_name_the_releases_that_were_run(begin: str, end: str, row: str) -> None:
    text = " ".join((ROOT / "docs/limits.md").read_text(encoding="utf-8").split())
    found = features_gpu.load()
    (of,) = [one for one in ROWS if one.name == row]
    lines = features_gpu.lines(of, found)
    green = {line.release for line in lines if line.verdict.startswith("green")}
    known = {one["release"] for one in found}
    assert _releases(text.partition(begin)[2].partition(end)[0], known) == green


def test_neighbours_name_the_releases_with_which_nixl_was_run() -> None:
    (row,) = [row for row in ROWS if row.name.startswith("NIXL")]
    files = features_releases.files()
    of = {"0.32.0": features.load(), **{one: features.load(file) for one, file in files.items()}}
    said = {release: features.verdict(row, found.get(row.name)) for release, found in of.items()}
    green = {release for release, verdict in said.items() if verdict.startswith("green")}
    text = (ROOT / "docs/neighbours.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("| NixlConnector |")]
    assert _releases(line, set(of)) == green


def _releases(text: str, known: set[str]) -> set[str]:
    """Those that a text names, and those of the known ones that are in its ranges."""
    found = set()
    for first, last in re.findall(r"(0\.\d+\.\d+)(?: to (0\.\d+\.\d+))?", text):
        of = Version(first), Version(last or first)
        found |= {first} | {one for one in known if of[0] <= Version(one) <= of[1]}
    return found
