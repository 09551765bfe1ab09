"""Where results are written, and what is said of the tree that they come from."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from scripts.matrix import results


@pytest.mark.parametrize(("kind", "name"), results.KINDS.items())
def test_a_result_goes_to_the_file_of_its_kind(tmp_path: Path, kind: str, name: str) -> None:
    result = {"kind": kind, "release": "0.26.0"}
    text = results.write(tmp_path / "new", result)
    assert (tmp_path / f"new/{name}-0.26.0.json").read_text() == text
    assert json.loads(text) == result


def test_kept_results_have_the_names_of_their_kinds() -> None:
    files = results.files()
    assert len(files) > 50
    kept = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    assert [file.stem for file in files] == [
        f"{results.KINDS[one['kind']]}-{one['release']}" for one in kept
    ]


def test_what_mutants_have_found_is_of_no_release(tmp_path: Path) -> None:
    results.write(tmp_path, {"kind": "scheduler", "release": "0.26.0"})
    (tmp_path / results.MUTANTS).write_text("{}")
    assert [file.name for file in results.files(tmp_path)] == ["scheduler-0.26.0.json"]


def test_a_changed_tree_has_a_plus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "kvoffload_patch").mkdir()
    (tmp_path / "kvoffload_patch/a.py").write_text("a = 1\n")
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    clean = results.provenance()["commit"]
    assert clean and not clean.endswith("+")
    (tmp_path / "README").write_text("of no effect on a run\n")
    assert results.provenance()["commit"] == clean
    assert results.provenance("README")["commit"] == f"{clean}+"
    (tmp_path / "kvoffload_patch/a.py").write_text("a = 2\n")
    assert results.provenance()["commit"] == f"{clean}+"


def _whole(*tests: dict, **other: object) -> dict:
    about = {"kind": "cpu-engine", "release": "0.26.0", "date": "1", "commit": "old"}
    return {**about, "tests": list(tests), "pytest_status": 0, **other}


def test_some_tests_take_their_places_in_the_file_of_all_with_a_date_of_their_own(tmp_path: Path):
    results.write(tmp_path, _whole({"name": "a"}, {"name": "b"}, tokens_compared=10))
    again = [{"name": "a", "outcome": "passed"}, {"name": "c"}]
    new = _whole(*again, date="2", commit="new", tokens_compared=0)
    found = results.with_the_rest(new, tmp_path)
    later = {"date": "2", "commit": "new"}
    assert found["tests"] == [{**later, **again[0]}, {"name": "b"}, {**later, **again[1]}]
    assert found["tokens_compared"] == 10 and (found["date"], found["commit"]) == ("1", "old")


def test_of_no_file_some_tests_are_all_there_is(tmp_path: Path):
    assert results.with_the_rest(_whole({"name": "a"}), tmp_path) == _whole({"name": "a"})


@pytest.mark.parametrize(("before", "now", "wanted"), [(1, 0, 0), (0, 1, 1), (3, 0, 3)])
def test_a_run_of_some_tests_mends_what_failed_but_not_a_run_that_broke_off(
    tmp_path: Path, before: int, now: int, wanted: int
):
    results.write(tmp_path, _whole({"name": "a"}, pytest_status=before))
    found = results.with_the_rest(_whole({"name": "a"}, pytest_status=now), tmp_path)
    assert found["pytest_status"] == wanted
