"""docs/features.md says when results were made, and of which trees with changes."""

from __future__ import annotations

from typing import Any

from scripts.matrix import features, features_releases, features_ways
from scripts.matrix.features_rows import ROWS
from scripts.matrix.features_when import changed, dates

FIRST, SECOND = ROWS[0].name, ROWS[1].name


def result(date: str, commit: str = "abc") -> dict[str, Any]:
    tests = [{"test": ROWS[0].tests[0], "outcome": "passed"}]
    return {"release": "0.30.0", "date": date, "commit": commit, "tests": tests}


def test_of_several_days_the_first_and_the_last_are_said() -> None:
    days = [result(f"2026-11-{day}") for day in (25, 23, 30)]
    assert dates(days) == "2026-11-23 to 2026-11-30"
    assert dates(days[:1] * 2) == "2026-11-25"


def test_the_head_of_a_release_has_the_day_of_its_oldest_row() -> None:
    of = {FIRST: result("2026-11-23"), SECOND: result("2026-11-30")}
    assert "| 0.30.0, 2026-11-23 to 2026-11-30 |" in features.page({}, {"0.30.0": of})
    text = features.page({}, ways={"v2": of, "asynchronous": {}})
    assert "| Runner V2, 0.30.0, 2026-11-23 to 2026-11-30 |" in text


def test_a_result_of_a_tree_with_changes_is_told_with_its_commit() -> None:
    day = "2026-11-23"
    of = {FIRST: result(day, "abc+"), SECOND: result(day, "abc+"), "gone": result(day, "abc+")}
    lines = changed(ROWS[:2], {"0.30.0": of, "0.26.0": {FIRST: result(day)}})
    assert lines[-1] == f"- 0.30.0, abc+: {FIRST}; {SECOND}"
    assert changed(ROWS, {"0.26.0": {FIRST: result(day)}}) == []


def test_every_such_result_that_is_kept_is_on_the_page() -> None:
    """Of the first table, of other releases and of ways alike."""
    text = features.PAGE.read_text(encoding="utf-8").partition("## Results of changed files")[2]
    files = [features.FILE, *features_releases.files().values()]
    files += map(features_ways.file, features_ways.WAYS)
    told = set(text.splitlines())
    for file in files:
        for name, found in features.load(file).items():
            if found["commit"].endswith("+"):
                of_commit = [line for line in told if f", {found['commit']}: " in line]
                assert any(name in line for line in of_commit), (file.name, name)
