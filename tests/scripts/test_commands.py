"""The commands of scripts/: what lies at its top, and how a folder's command is found and run."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from scripts import ROOT, Refused, dispatch

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
    assert (wrong.returncode, wrong.stdout) == (2, "")
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


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (Refused("expected a, found b; give a."), "error: expected a, found b; give a.\n"),
        (
            FileNotFoundError(2, "No such file", "here"),
            "error: expected files and folders that can be used, found [Errno 2] No such file: "
            "'here'; give others.\n",
        ),
    ],
)
def test_what_a_command_cannot_use_is_one_sentence_and_its_own_status(
    raised: Exception,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main() -> None:
        raise raised

    monkeypatch.setitem(sys.modules, "scripts.room", ModuleType("scripts.room"))
    monkeypatch.setitem(sys.modules, "scripts.room.made_up", SimpleNamespace(main=main))
    monkeypatch.setattr(sys, "argv", ["scripts/room", "try"])
    assert dispatch("room", "A room.", {"try": ("made_up", "tries")}) == 2
    assert capsys.readouterr().err == says


@pytest.mark.parametrize("raised", [OSError("the disk"), ValueError("a fault of ours")])
def test_what_is_no_refusal_is_raised(raised: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def main() -> None:
        raise raised

    monkeypatch.setitem(sys.modules, "scripts.room", ModuleType("scripts.room"))
    monkeypatch.setitem(sys.modules, "scripts.room.made_up", SimpleNamespace(main=main))
    monkeypatch.setattr(sys, "argv", ["scripts/room", "try"])
    with pytest.raises(type(raised)):
        dispatch("room", "A room.", {"try": ("made_up", "tries")})


def test_a_python_that_lacks_a_module_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/room", "try"])
    room = ModuleType("scripts.room")
    room.__path__ = []
    monkeypatch.setitem(sys.modules, "scripts.room", room)
    assert dispatch("room", "A room.", {"try": ("lacking", "tries")}) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: expected a Python that has scripts.room.lacking, found ")
