"""The commands as they are typed, and the table that they print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts import ROOT
from scripts.simulate import report
from scripts.simulate.model import Figures, Machine
from scripts.simulate.sides import SIDES


def simulate(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/simulate"), *args]
    return subprocess.run(command, text=True, capture_output=True, cwd="/", check=False)


def test_a_trace_is_written_and_replayed_with_every_side(tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    done = simulate("generate", "agents", str(out), "--seconds", "40")
    assert done.returncode == 0, done.stderr
    done = simulate("replay", str(out))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("|")][2:] == [
        *(side.words for side in SIDES.values()),
        "optimum",
    ]
    assert "requests" in done.stderr


def test_a_wrong_trace_ends_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("[]\n")
    done = simulate("replay", str(tmp_path / "wrong"), "--sides", "none")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path}/wrong, line 1: expected an object of JSON")
    assert len(done.stderr.splitlines()) == 1


def test_figures_become_tokens_and_bytes() -> None:
    machine = Machine(block_tokens=512, token_bytes=1 << 20)  # half a GiB a block
    figures = Figures(100, 30, 40, 30, 8, 4, 2, 0, 6, [0.5, 1.5], 20.0, 0.003)
    _, none, best = report.rows({"none": figures}, (90, 100), machine)
    assert none == ["plain vLLM", "70.0", "40.0", "15", "4", "2", "0.3", "1.00", "1.50", "0", "3"]
    assert best[:4] == ["optimum", "90.0", "-", "5"]
    assert len(report.rows({"none": figures}, None, machine)) == 2
