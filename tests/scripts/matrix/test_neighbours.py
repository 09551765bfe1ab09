"""Packages to test beside: installed once, whole or not at all, and found by the tests' Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.matrix import neighbours
from scripts.matrix.features_rows import ROWS

PYTHON = Path("/a/python")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands of the installer, which puts a file where it is told to."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> None:
        ran.append(command)
        target = Path(command[command.index("--target") + 1])
        target.mkdir(parents=True)
        if len(ran) == fails:
            raise subprocess.CalledProcessError(1, command)

    fails = 2
    monkeypatch.setattr(neighbours, "FOLDER", tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    return ran


def test_each_is_installed_once_without_what_it_requires(installed: list[list[str]]) -> None:
    for _ in range(2):
        env = neighbours.environment(["NIXL", "NIXL"], PYTHON, {"PYTHONPATH": "/x", "HOME": "/h"})
    [command] = installed
    assert command[0] == str(PYTHON) and "--no-deps" in command
    assert command[-3:] == ["nixl==1.5.1", "nixl-cu12==1.5.1", "nixl-cu13==1.5.1"]
    before, folder = env["PYTHONPATH"].split(os.pathsep)
    assert before == "/x" and Path(folder).is_dir() and env["HOME"] == "/h"


def test_what_was_not_installed_whole_is_installed_again(
    installed: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(neighbours.PACKAGES, "another", ("another==1",))
    neighbours.environment(["NIXL"], PYTHON, {})
    with pytest.raises(subprocess.CalledProcessError):
        neighbours.environment(["another"], PYTHON, {})
    env = neighbours.environment(["another"], PYTHON, {})
    assert len(installed) == 3 and installed[1] == installed[2]
    assert Path(env["PYTHONPATH"]).is_dir()


def test_without_any_the_environment_stays(installed: list[list[str]]) -> None:
    assert neighbours.environment([], PYTHON, {"HOME": "/h"}) == {"HOME": "/h"}
    assert neighbours.environment([], PYTHON, None) == dict(os.environ) and not installed


def test_rows_name_packages_that_are_known() -> None:
    assert {name for row in ROWS for name in row.beside} == set(neighbours.PACKAGES)
