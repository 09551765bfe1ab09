"""What `matrix gpu` makes of what its program prints, with a program that plays nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts.matrix import gpu

PROGRAM = """\
import json, sys
print("a line of an engine")
outcomes = {outcomes!r}
tests = [{{"name": str(sys.argv[1:]), "outcome": outcome}} for outcome in outcomes]
print(json.dumps({{"release": "0.26.0", "tests": tests}}))
"""


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line; results go to ``out`` in the test's folder."""
    line = ["matrix gpu", "--out", str(tmp_path / "out"), "--runners", "v1", "--commit", "abc"]
    line += ["--kinds", "mla"]
    monkeypatch.setattr(sys, "argv", line)
    monkeypatch.setattr(gpu, "PROGRAM", tmp_path / "program.py")
    return line


@pytest.mark.parametrize(
    ("outcomes", "status", "verdict"),
    [(["passed", "passed"], 0, "green"), (["passed", "failed"], 1, "red")],
)
def test_the_result_has_a_verdict(
    argv: list[str], tmp_path: Path, outcomes: list[str], status: int, verdict: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(outcomes=outcomes))
    assert gpu.main() == status
    result = json.loads((tmp_path / "out/gpu-0.26.0.json").read_text())
    assert (result["kind"], result["verdict"], result["commit"]) == ("gpu-engine", verdict, "abc")
    assert result["tests"][0] == {"name": "['v1', '4', 'mla']", "outcome": "passed"}


def test_a_program_that_fails_leaves_no_result(argv: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit, match=r"expected a result of program\.py, found status 3"):
        gpu.main()
    assert not (tmp_path / "out").exists()
