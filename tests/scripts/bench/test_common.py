"""What the benchmarks share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import ROOT
from scripts.bench.common import ran, write_json


def test_numbers_of_a_list_share_a_line_and_all_else_is_as_it_was(tmp_path: Path) -> None:
    document = {
        "at": [1.5, -2, 3e-05], "none": [], "text": "[\n 1,\n 2]", "of lists": [[1, 2], [3]],
        "mixed": [1, "2", None], "named": {"one": 1, "numbers": [0]},
    }  # fmt: skip
    file = tmp_path / "new" / "found.json"
    write_json(file, document)
    text = file.read_text()
    assert json.loads(text) == document
    assert ' "at": [1.5, -2, 3e-05],\n' in text and ' "numbers": [0]\n' in text
    assert [path.name for path in file.parent.iterdir()] == ["found.json"]


@pytest.mark.parametrize("command", ["trace", "mechanisms"])
def test_what_needs_a_tier_says_so_before_it_starts_an_engine(command: str, tmp_path: Path) -> None:
    """A bare run found out once the engine was up, minutes later."""
    (tmp_path / "config.json").write_text("{}")
    environ = {name: v for name, v in os.environ.items() if not name.startswith("KVOFFLOAD_")}
    done = subprocess.run(
        [sys.executable, "scripts/bench", command, "--model", str(tmp_path)],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and f"scripts/bench {command} ..." in done.stderr


def test_without_a_file_nothing_is_written() -> None:
    write_json(None, {"one": object()})


def test_results_of_which_only_the_commands_differ_are_said_in_one_line() -> None:
    first = {"commit": "abc", "date": "2026-11-22T10:00", "cpu": "EPYC", "vllm": "0.26", "cpus": 2}
    first |= {"gpu": "none", "command": "bench a"}
    results = [first, {**first, "command": "bench b"}, {**first, "commit": "def"}, first]
    assert ran(*results) == [
        "Commit abc, 2026-11-22, EPYC, 2 cores, vLLM 0.26: `bench a`, `bench b`",
        "Commit def, 2026-11-22, EPYC, 2 cores, vLLM 0.26: `bench a`",
    ]
