"""Finding the command, making sure its Python runs our start-up code, and becoming it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import kvoffload_patch

_STARTUP_CODE_RAN = "import sys; sys.exit('kvoffload_patch._bootstrap' not in sys.modules)"


def resolve(command: Sequence[str]) -> list[str] | None:
    """The command with a full path first, or None: beside this Python, on PATH, or a .py file."""
    word, *rest = command
    found = shutil.which(word, path=os.path.dirname(sys.executable)) or shutil.which(word)
    if found:
        return [found, *rest]
    if word.endswith(".py") and os.path.isfile(word):
        return [sys.executable, word, *rest]
    return None


def replace_process(command: list[str], armed: bool) -> OSError:
    """Become the command, its environment being this one; returns only if that failed."""
    if armed and not _runs_startup_code(_interpreter(command[0])):
        _add_to_pythonpath(Path(kvoffload_patch.__file__).parent / "_sitecustomize")
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, os.environ)
    except OSError as error:
        return error


def _interpreter(program: str) -> str:
    """The Python that will run `program`: itself, the one its first line names, or this one."""
    words = [program]
    if not os.path.basename(program).startswith("python"):
        words = _first_line(program)[2:].split()
    if words and os.path.basename(words[0]) == "env":
        del words[0]
    if words and os.path.basename(words[0]).startswith("python"):
        return shutil.which(words[0]) or sys.executable
    return sys.executable


def _first_line(program: str) -> str:
    """The line that names a script's interpreter; empty for anything else."""
    try:
        with open(program, "rb") as file:
            line = file.readline(512)
    except OSError:
        return ""
    return line.decode("utf-8", "replace") if line.startswith(b"#!") else ""


def _runs_startup_code(interpreter: str) -> bool:
    """Ask a child: it knows about site folders, editable installs and PYTHONPATH better than us."""
    command = [interpreter, "-c", _STARTUP_CODE_RAN]
    return subprocess.run(command, capture_output=True).returncode == 0


def _add_to_pythonpath(folder: Path) -> None:
    behind = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([behind] if behind else [])])
