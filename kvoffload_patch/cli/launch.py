"""Finding the command, making sure its Python runs our start-up code, and becoming it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import kvoffload_patch
from kvoffload_patch import launch_token
from kvoffload_patch._bootstrap import say
from kvoffload_patch.cli import watch

# python, python3.13, python3.13t, python3-dbg; not a user's python_serve.sh, which would be run
# with the options of an interpreter.
_PYTHON = re.compile(r"python[\d.]*[dt]*(-dbg)?", re.ASCII)
_STARTUP_CODE_RAN = "import sys; sys.exit('kvoffload_patch._bootstrap' not in sys.modules)"
# What a process ignores stays ignored in the program that it becomes, and in all that this starts.
_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)


class NotArmed(Exception):
    """The command's Python would not run our start-up code; the text is one sentence."""


def resolve(command: Sequence[str]) -> list[str] | None:
    """The command with a full path first, or None: beside this Python, on PATH, or a .py file."""
    word, *rest = command
    found = shutil.which(word, path=os.path.dirname(sys.executable)) or shutil.which(word)
    if found:
        return [found, *rest]
    if word.endswith(".py") and os.path.isfile(word):
        return [sys.executable, word, *rest]
    return None


def prepare(command: Sequence[str]) -> None:
    """Change the environment so that the command's Python runs our start-up code.

    What Python a shell script or another program will run is not known: it gets the folder that
    any Python looks at.

    Raises:
        NotArmed: the Python is known, and would not run it all the same.
    """
    interpreter = _interpreter(command[0])
    if interpreter and _runs_startup_code(interpreter):
        return
    _add_to_pythonpath(Path(kvoffload_patch.__file__).parent / "_sitecustomize")
    if interpreter and not _runs_startup_code(interpreter):
        raise NotArmed(
            f"expected `{' '.join(interpreter)}`, which runs {command[0]}, to run the start-up code"
            " of kvoffload_patch, found that it does not; install kvoffload_patch for that Python"
            " and let it read its site-packages and its environment."
        )


def replace_process(command: list[str], watched: bool) -> OSError:
    """Become the command, its environment being this one; returns only if that failed.

    Args:
        command: a full path and arguments.
        watched: pass a token, and end a vLLM below that does not confirm it.
    """
    if watched:
        _watch(command)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full log is no reason not to serve
            stream.flush()
    before = {number: signal.signal(number, signal.SIG_DFL) for number in _PYTHON_IGNORES}
    try:
        os.execvpe(command[0], command, os.environ)
    except OSError as error:
        for number, handler in before.items():
            signal.signal(number, handler)
        return error


def _watch(command: Sequence[str]) -> None:
    """Pass a token, that of a launch which runs this one if there is one, and watch."""
    token = os.environ.setdefault(launch_token.VARIABLE, os.urandom(8).hex())
    try:
        watch.start(command, token)
    except OSError as error:
        say(
            f"kvoffload_patch: a vLLM that is started without the CPU tier will not be noticed,"
            f" because this system does not show what runs ({error})."
        )


def _interpreter(program: str) -> list[str] | None:
    """The Python that will run `program`, with its options: itself, or that of its first line."""
    words = [program]
    if not _is_python(program):
        words = _first_line(program)[2:].split()
    if words and os.path.basename(words[0]) == "env":
        del words[0]
    if words and _is_python(words[0]):
        found = shutil.which(words[0])
        return [found, *words[1:]] if found else None
    return None


def _is_python(program: str) -> bool:
    return bool(_PYTHON.fullmatch(os.path.basename(program)))


def _first_line(program: str) -> str:
    """The line that names a script's interpreter; empty for anything else."""
    try:
        with open(program, "rb") as file:
            line = file.readline(512)
    except OSError:
        return ""
    return line.decode("utf-8", "replace") if line.startswith(b"#!") else ""


def _runs_startup_code(interpreter: Sequence[str]) -> bool:
    """Ask a child: it knows about site folders, editable installs and PYTHONPATH better than us.

    Raises:
        NotArmed: there can be no such child.
    """
    command = [*interpreter, "-c", _STARTUP_CODE_RAN]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError as error:  # as a binary for other processors
        raise NotArmed(
            f"expected to run {interpreter[0]}, found {error.strerror}; give a program whose Python"
            " this system can run."
        ) from None


def _add_to_pythonpath(folder: Path) -> None:
    behind = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([behind] if behind else [])])
