"""docs/features.md says what the results say, and no cell of it is empty."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import ROOT
from scripts.matrix import features, features_gpu, features_releases, features_ways
from scripts.matrix.features_row import Row
from scripts.matrix.features_rows import ROWS

ROW = Row("a shape", "real engine", ("tests/x.py::test_a",))
REMEDY = "; set KVOFFLOAD_STRICT=0 to serve without the CPU tier."
YET = "not run yet"
ABOUT = {"release": "0.32.0", "date": "2026-11-23", "commit": "abc"}


def result(*tests: dict[str, str]) -> dict[str, object]:
    """Of one row."""
    return {**ABOUT, "tests": [{"test": "tests/x.py::test_a", **test} for test in tests]}


def test_the_page_is_that_of_the_results() -> None:
    assert features.PAGE.read_text(encoding="utf-8") == features.whole_page()


def test_no_cell_is_empty_and_no_row_is_there_twice() -> None:
    """Of the page that is read: one without results says of all rows that they were not run."""
    text = features.PAGE.read_text(encoding="utf-8")
    assert _lacking(text) == []
    first, *others = _tables(text)
    assert [cells[0] for cells in first[2:]] == [row.name for row in ROWS]
    assert len(ROWS) == len({row.name for row in ROWS}) and len(others) > 5


def test_a_result_that_is_missing_in_any_table_is_seen() -> None:
    """As a row would be that was added, and not run on some release or in some way."""
    name = next(row.name for row in ROWS if features_ways.is_played(row))
    found = features.load()
    release, of = next((r, features.load(f)) for r, f in features_releases.files().items())
    ways = {way: features.load(features_ways.file(way)) for way in features_ways.WAYS}
    whole = features.page(found, {release: of}, features_gpu.load(), ways)
    assert _lacking(whole) == []
    for lost in (found, of, *ways.values()):
        result = lost.pop(name)
        (said,) = _lacking(features.page(found, {release: of}, features_gpu.load(), ways))
        assert name in said
        lost[name] = result


def _tables(text: str) -> list[list[list[str]]]:
    """The cells of each table's lines, its head and what is below that included."""
    tables: list[list[list[str]]] = []
    before = ""
    for line in text.splitlines():
        if line.startswith("|"):
            if not before.startswith("|"):
                tables.append([])
            tables[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        before = line
    return tables


def _lacking(text: str) -> list[str]:
    """Lines of tables of which a cell is empty, there is one too few, or a row was not run yet."""
    return [
        " | ".join(cells)
        for table in _tables(text)
        for cells in table
        if len(cells) != len(table[0]) or not all(cells) or any(YET in cell for cell in cells)
    ]


def test_every_row_names_tests_that_are_there() -> None:
    for row in ROWS:
        for test in row.tests:
            file, _, name = test.partition("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert not name or f"def {name.partition('[')[0]}(" in text, test


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (result({"outcome": "passed"}, {"outcome": "passed"}), "green: 2 passed"),
        (result({"outcome": "passed"}, {"outcome": "failure", "why": "no"}), "**red**: no"),
        (result({"outcome": "skipped", "why": "Skipped: no V2"}), "not run: no V2"),
        (
            result({"outcome": "passed"}, {"outcome": "skipped", "why": "Skipped: plain ends"}),
            "green: 1 passed, 1 not run: plain ends",
        ),
        (result({"outcome": "passed", "refusal": "expected a"}), "refused: expected a"),
        (
            result(
                {"outcome": "passed", "refusal": f"expected a{REMEDY}"},
                {"outcome": "passed", "refusal": f"expected a{REMEDY}"},
                {"outcome": "passed", "refusal": f"expected b{REMEDY}"},
            ),
            f"refused: expected a / expected b{REMEDY}",
        ),
        (result(), "not run yet"),
        (result({"test": "tests/x.py::test_that_the_row_had", "outcome": "passed"}), "not run yet"),
        (None, "not run yet"),
    ],
)
def test_a_verdict_says_what_came_out(found: dict | None, said: str) -> None:
    assert features.verdict(ROW, found) == said


def test_a_row_whose_tests_take_another_release_for_vllms_says_which() -> None:
    """It is the same whichever is installed, so the columns of others have no such row."""
    found = features.load()
    for row in ROWS:
        played = found.get(row.name, {"tests": []})["tests"]
        tests = [one for one in played if features._is_of(one, row)]
        assert {one.get("with_release", "") for one in tests} <= {row.release}, row.name
    row = next(row for row in ROWS if row.release not in ("", "0.32.0"))
    played = {**ABOUT, "tests": [{"test": row.tests[0], "outcome": "passed", "refusal": "a"}]}
    text = features.page({row.name: played}, {"0.30.0": {ROWS[0].name: played}})
    assert f"| {row.name} | {row.what} | {row.release} | 2026-11-23 | refused: a |" in text
    others = text.partition("## On other releases")[2]
    assert row.name not in others and ROWS[0].name in others


def test_a_row_that_one_release_alone_has_played_says_so_in_the_columns_of_others() -> None:
    row = ROW._replace(only="0.32.0")
    passed = {row.name: result({"outcome": "passed"})}
    others = {"0.31.0": {ROWS[0].name: result()}, "0.30.0": passed}
    told = features._told_of(others, [row], features._on_another_release)
    assert told["0.31.0"][row.name] == "not run: played on 0.32.0 alone"
    assert told["0.30.0"][row.name] == "green: 1 passed", "it has a result there"
    assert features._told_of({"v2": {}}, [row])["v2"][row.name] == "not run yet"


def test_a_row_of_one_release_is_not_run_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[Row] = []
    file: list[Path | None] = []

    @contextlib.contextmanager
    def where(options: object, installed: str) -> Iterator[features_releases.Where]:
        yield features_releases.Where(Path("python"), None, "0.30.0", file[-1])

    monkeypatch.setattr(features, "_play", lambda rows, where: played.extend(rows) or [])
    monkeypatch.setattr(features_releases, "where", where)
    monkeypatch.setattr(features, "PAGE", Path(os.devnull))
    monkeypatch.setattr(features, "release_in_use", lambda: "0.32.0")
    monkeypatch.setattr("sys.argv", ["features"])
    for results, some in ((None, True), (Path("0.30.0.json"), False)):
        file.append(results)
        played.clear()
        assert features.main() == 0
        assert any(row.release for row in played) == some and ROWS[0] in played


def test_results_that_others_write_meanwhile_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, mine, theirs = tmp_path / "0.30.0.json", ROWS[0], ROWS[1]

    def run(rows: list[Row], where: features_releases.Where) -> dict[str, dict]:
        file.write_text(json.dumps({theirs.name: {**ABOUT, "tests": []}}))
        return {row.name: {**ABOUT, "tests": []} for row in rows}

    monkeypatch.setattr(features, "run", run)
    features._play([mine], features_releases.Where(Path("python"), None, "0.30.0", file))
    assert list(features.load(file)) == [mine.name, theirs.name]


def test_what_no_test_runs_is_not_green() -> None:
    assert features.verdict(Row("b", "the checks"), None) == "not shown: no test runs it"


def test_how_engines_end_that_have_lost_a_node_is_in_a_table() -> None:
    ends = {"plain": {"error": "A", "seconds": 0.04}, "tier": {"error": "B", "seconds": 12.0}}
    lost = json.dumps({"executor": "Ray", "when": "node_lost_at_work", **ends})
    text = features.page({ROW.name: result({"outcome": "passed", "lost": lost})})
    assert "| Ray | while it answers | A, 0.0 s | B, 12.0 s |" in text
    assert "A lost node" not in features.page({ROW.name: result({"outcome": "passed"})})


def test_a_node_lost_on_gpus_is_in_the_same_table() -> None:
    ends = {"plain": {"error": "A", "seconds": 0.04}, "tier": {"error": "B", "seconds": 12.0}}
    lost = {"executor": "Ray, two ranks", "when": "node_lost", **ends}
    counted = {"answers": 0, "answers_equal": 0, "blocks_loaded": 0, "outcome": "passed"}
    test = {"name": "v2, by Ray, two ranks, a node lost between requests", "lost": lost, **counted}
    head = {"release": "0.26.0", "device": "a GPU", "date": "2026-11-25", "commit": "abc"}
    text = features.page({}, None, [{**head, "tests": [test]}])
    said = "| Ray, two ranks, runner V2, a GPU | between requests | A, 0.0 s | B, 12.0 s |"
    assert said in text


def test_each_commit_that_was_run_is_in_the_history() -> None:
    """One of a branch that was put onto another commit since cannot be run again."""
    if _git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("the history is not here, or not all of it")
    history = _git("log", "--format=%H").split()
    for file in (features.FILE, *features_releases.files().values()):
        for name, found in features.load(file).items():
            played = found["commit"].removesuffix("+").removesuffix(" and changes")
            known = any(commit.startswith(played) for commit in history)
            assert known, f"{file.name}, {name}: {found['commit']}"


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True).stdout
