"""The project's commands: the files at the top, and each folder that has a ``__main__.py``."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REFUSED = 2  # the status of a command that cannot use what it was given, as argparse has it


class Refused(ValueError):
    """A command cannot use what it was given; the text: what was expected, found, and to do."""


def dispatch(folder: str, purpose: str, commands: dict[str, tuple[str, str]]) -> int:
    """Run the command of a folder that the command line names, with the arguments behind it.

    Args:
        folder: below scripts/, as it is typed.
        purpose: of all commands together, in one sentence.
        commands: by name, the module below the folder that has its ``main()``, and what it does.

    Returns:
        The exit status: `REFUSED`, with a sentence on stderr, where the command raised `Refused`,
        could not read or write a file, or is not for this Python.
    """
    width = max(map(len, commands))
    listed = "\n".join(f"  {name:{width}}  {what}" for name, (_, what) in commands.items())
    parser = argparse.ArgumentParser(
        prog=f"scripts/{folder}",
        usage="%(prog)s COMMAND [ARGUMENT ...]",
        description=f"{purpose}\n\ncommands:\n{listed}\n\nCOMMAND --help says what it takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=commands, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sys.argv = [f"scripts/{folder} {given.command}", *given.arguments]
    try:
        module = importlib.import_module(f"scripts.{folder}.{commands[given.command][0]}")
        return int(module.main() or 0)
    except ModuleNotFoundError as error:
        text = (
            f"expected a Python that has {error.name}, found {sys.executable}; use "
            "the one of .venv, which scripts/test makes"
        )
    except Refused as refused:
        text = str(refused)
    except OSError as error:
        if error.filename is None:  # no file: whatever it is, nobody has given it
            raise
        text = f"expected files and folders that can be used, found {error}; give others"
    print(f"error: {text}" + "." * (text[-1:] not in ".?"), file=sys.stderr)
    return REFUSED
