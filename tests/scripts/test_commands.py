"""The commands of scripts/: what lies at its top, and how a folder's command is found and run."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from scripts import ROOT, dispatch

FOLDERS = sorted(file.parent for file in (ROOT / "scripts").glob("*/__main__.py"))
DISPATCHED = [folder for folder in FOLDERS if folder.name != "demo_app"]


def table_of(folder: Path) -> dict[str, tuple[str, str]]:
    """The commands that the folder's ``__main__.py`` has."""
    for node in ast.parse((folder / "__main__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMMANDS":
            return dict(ast.literal_eval(node.value))
    raise AssertionError(f"{folder} has no COMMANDS")


COMMANDS = [(folder, name) for folder in DISPATCHED for name in table_of(folder)]


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """As it is typed, from another folder, with nothing on the path that is not there anyway."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(folder), *args]
    return subprocess.run(command, text=True, capture_output=True, cwd="/", env=env, check=False)


def test_only_what_is_typed_lies_at_the_top() -> None:
    found = {path.name for path in (ROOT / "scripts").iterdir() if path.is_file()}
    assert found == {"demo", "test", "sanitize", "site", "__init__.py"}
    assert [folder.name for folder in FOLDERS] == [
        "bench",
        "demo_app",
        "matrix",
        "release",
        "simulate",
        "soak",
    ]


def test_every_folder_is_a_package() -> None:
    folders = {file.parent for file in (ROOT / "scripts").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize(
    ("folder", "name"), COMMANDS, ids=lambda value: getattr(value, "name", value)
)
def test_a_command_has_a_module_with_a_main(folder: Path, name: str) -> None:
    module, purpose = table_of(folder)[name]
    file = folder.joinpath(*module.split(".")).with_suffix(".py")
    functions = ast.parse(file.read_text(encoding="utf-8")).body
    assert any(isinstance(n, ast.FunctionDef) and n.name == "main" for n in functions)
    assert purpose


@pytest.mark.parametrize("folder", DISPATCHED, ids=lambda folder: folder.name)
def test_help_lists_the_commands(folder: Path) -> None:
    done = run(folder, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines if line and line[0] in table_of(folder)] == [
        *table_of(folder)
    ]
    assert run(folder).returncode == run(folder, "no-such-command").returncode == 2


def test_the_rest_of_the_line_is_the_commands() -> None:
    done = run(ROOT / "scripts/release", "patches", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: release patches [-h] [--sources DIR]")
    wrong = run(ROOT / "scripts/release", "patches", "not-a-release")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr.startswith("error: expected a release such as 0.32.0, found 'not-a-")


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (3, 3)])
def test_what_main_returns_is_the_status(
    returned: int | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []

    def main() -> int | None:
        given.extend(sys.argv)
        return returned

    module = SimpleNamespace(main=main)
    monkeypatch.setitem(sys.modules, "scripts.room", module)
    monkeypatch.setitem(sys.modules, "scripts.room.made_up", module)
    monkeypatch.setattr(sys, "argv", ["scripts/room", "try", "-x", "--", "y"])
    assert dispatch("room", "A room.", {"try": ("made_up", "tries")}) == status
    assert given == ["scripts/room try", "-x", "--", "y"]


def test_a_python_that_lacks_a_module_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/room", "try"])
    room = ModuleType("scripts.room")
    room.__path__ = []
    monkeypatch.setitem(sys.modules, "scripts.room", room)
    with pytest.raises(SystemExit, match="error: expected a Python that has scripts.room.lacking"):
        dispatch("room", "A room.", {"try": ("lacking", "tries")})
