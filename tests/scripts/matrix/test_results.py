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
    files = sorted(results.FOLDER.glob("*.json"))
    kept = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    assert [file.stem for file in files] == [
        f"{results.KINDS[one['kind']]}-{one['release']}" for one in kept
    ]


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
    (tmp_path / "kvoffload_patch/a.py").write_text("a = 2\n")
    assert results.provenance()["commit"] == f"{clean}+"
