"""`matrix mutants` on a made-up package; that its list fits this tree, and what it found last."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts import ROOT
from scripts.matrix import mutants, results
from scripts.matrix.mutants_list import Mutant

SOURCE = """\
def add(a, b):
    return a + b


def twice(a):
    return add(a, a)
"""
TESTS = """\
from made_up import sums


def test_sums():
    assert sums.add(2, 3) == 5


def test_nothing():
    assert sums.twice
"""
MINUS = Mutant("sums are differences", "sums.py", "a + b", "a - b", ("test_sums.py",))
UNSEEN = Mutant(
    "twice is once", "sums.py", "add(a, a)", "add(a, 0)", ("test_sums.py::test_nothing",)
)
BROKEN = Mutant("it cannot be imported", "sums.py", "def add(", "no()\ndef add(", ("test_sums.py",))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package, a test of it, and how pytest finds both."""
    for name in ("made_up", "scripts", "tests"):
        (tmp_path / name).mkdir()
    (tmp_path / "made_up/__init__.py").touch()
    (tmp_path / "made_up/sums.py").write_text(SOURCE)
    (tmp_path / "tests/test_sums.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    monkeypatch.setattr(mutants, "PACKAGE", "made_up")
    monkeypatch.setattr(mutants, "COPIED", ("made_up", "scripts", "tests", "pyproject.toml"))
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    return tmp_path


def main(monkeypatch: pytest.MonkeyPatch, *words: str, listed: tuple[Mutant, ...]) -> int:
    """The command with one job: every fault is put into the same copy."""
    monkeypatch.setattr(mutants, "MUTANTS", listed)
    monkeypatch.setattr(sys, "argv", ["scripts/matrix mutants", "--jobs", "1", *words])
    return mutants.main()


def test_a_fault_is_noticed_survives_or_cannot_be_tried(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tree / "found.json"
    assert main(monkeypatch, "--json", str(file), listed=(MINUS, UNSEEN, BROKEN)) == 1
    found = json.loads(file.read_text())
    by_name = {one["name"]: one for one in found["mutants"]}
    assert [one["outcome"] for one in found["mutants"]] == ["noticed", "survives", "not run"]
    noticed = by_name[MINUS.name]
    assert noticed["by"] == "tests/test_sums.py::test_sums" and "-1 == 5" in noticed["why"]
    assert "1 passed" in by_name[UNSEEN.name]["why"]
    assert found["clean"]["status"] == 0 and "2 passed" in found["clean"]["said"]
    assert {"date", "commit", "cpu", "cpus", "python", "seconds"} <= set(found)
    assert found["cpu_seconds"] > 0
    said = capsys.readouterr().out
    assert "survives" in said and "1 of 3 noticed; without a fault: 2 passed" in said
    assert (tree / "made_up/sums.py").read_text() == SOURCE, "the tree is only read"


def test_all_that_were_asked_for_are_noticed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(monkeypatch, "differences", listed=(MINUS, UNSEEN)) == 0


@pytest.mark.parametrize("words", [("nosuch",), ("differences", "nosuch")])
def test_a_word_that_no_name_has_is_refused_before_anything_is_run(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants, "run", None)
    with pytest.raises(SystemExit) as refused:
        main(monkeypatch, *words, listed=(MINUS,))
    assert refused.value.code == 2
    said = f"error: expected words that names of faults have, found {words[-1]!r}\n"
    assert capsys.readouterr().err.endswith(said)


def test_a_test_that_fails_in_any_case_notices_nothing(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "tests/test_sums.py").write_text(TESTS.replace("== 5", "== 6"))
    assert main(monkeypatch, listed=(MINUS,)) == 1
    said = capsys.readouterr().out
    assert "fails without a fault: tests/test_sums.py::test_sums: assert 5 == 6\n" in said


def test_a_part_is_not_recorded(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        main(monkeypatch, "differences", "--json", str(tree / "found.json"), listed=(MINUS,))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text": "a * b"}, "expected its text in sums.py once, found it 0 times"),
        ({"text": "a"}, "expected its text in sums.py once, found it 7 times"),
        ({"file": "gone.py"}, "expected its text in gone.py once, found it 0 times"),
        ({"instead": "a +"}, "expected Python with what stands instead, found none"),
        ({"instead": "(a + b)"}, "expected other code with what stands instead, found the same"),
        ({"tests": ("test_gone.py",)}, "expected a test test_gone.py, found none"),
        (
            {"tests": ("test_sums.py::test_gone",)},
            "expected a test test_sums.py::test_gone, found none",
        ),
    ],
)
def test_a_list_that_does_not_fit_the_tree_is_said_and_nothing_is_run(
    change: dict[str, str],
    said: str,
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(mutants, "run", None)
    assert main(monkeypatch, listed=(MINUS._replace(**change),)) == 1
    assert capsys.readouterr().out == f"{MINUS.name}: {said}\n"


def test_a_name_is_there_once(tree: Path) -> None:
    assert mutants.wrong([MINUS, MINUS], tree) == [f"{MINUS.name}: expected one fault of this name"]


def test_every_text_is_in_the_tree_once() -> None:
    assert mutants.wrong(mutants.MUTANTS, ROOT) == []
    folders = {str(Path(mutant.file).parent) for mutant in mutants.MUTANTS}
    engine = {f"integration/engine{room}" for room in ("", "/adapters", "/blocks", "/requests")}
    assert {"tier", "transfer", *engine, "integration/worker", "patching"} <= folders


def test_each_was_noticed_when_they_were_run_last() -> None:
    """A fault that is new, or has another name, is run and recorded."""
    found = json.loads((results.FOLDER / results.MUTANTS).read_text(encoding="utf-8"))
    assert [one["name"] for one in found["mutants"]] == [m.name for m in mutants.MUTANTS]
    assert mutants.verdict(found)[0]
