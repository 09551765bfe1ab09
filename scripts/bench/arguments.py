"""What commands take: each function is the `type` of a kind of argument, or returns one."""

from __future__ import annotations

import json
import math
import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from scripts.release.sources import RELEASE


def whole(least: int) -> Callable[[str], int]:
    """A whole number, no less than that."""

    def parsed(text: str) -> int:
        try:
            number = int(text) if text.isascii() else least - 1
        except ValueError:
            number = least - 1
        if number < least:
            raise ArgumentTypeError(f"expected a whole number of {least} or more, found {text!r}")
        return number

    return parsed


def wholes(least: int) -> Callable[[str], list[int]]:
    """Such numbers with commas between them."""
    one = whole(least)
    return lambda text: [one(part) for part in text.split(",")]


def positive(text: str) -> float:
    """A number above 0 that is not infinite."""
    if not 0 < _number(text) < math.inf:
        raise ArgumentTypeError(f"expected a finite number above 0, found {text!r}")
    return _number(text)


def least_zero(text: str) -> float:
    """Such a number, or 0."""
    if not 0 <= _number(text) < math.inf:
        raise ArgumentTypeError(f"expected a finite number of 0 or more, found {text!r}")
    return _number(text)


def _number(text: str) -> float:
    try:
        return float(text) if text.isascii() else math.nan
    except ValueError:
        return math.nan


def target(text: str) -> Path:
    """A file to be written, in a folder that is there."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        found = "a folder" if path.is_dir() else "no such folder"
        raise ArgumentTypeError(f"expected a file in a folder that is there, found {found}: {text}")
    return path


def read(text: str) -> Path:
    """A file that is there."""
    path = Path(text)
    if not path.is_file():
        raise ArgumentTypeError(f"expected a file that is there, found {text!r}")
    return path


def written(text: str) -> Path:
    """A file to be written, whose folder is made if it is not there."""
    path = Path(text)
    there = _nearest(path)
    is_possible = there.is_dir() or there == path.absolute()
    if path.is_dir() or not is_possible or not os.access(there, os.W_OK):
        raise ArgumentTypeError(f"expected a file or the name of a new one, found {text!r}")
    return path


def some(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Names with commas between them, each of which is known."""
    names = list(known)

    def parsed(text: str) -> list[str]:
        given = text.split(",")
        unknown = [name for name in given if name not in names]
        if unknown:
            raise ArgumentTypeError(f"expected some of {','.join(names)}, found {unknown[0]!r}")
        return given

    return parsed


def one(known: Iterable[str], what: str = "one") -> Callable[[str], str]:
    """A name that is known."""
    names = list(known)

    def parsed(text: str) -> str:
        if text not in names:
            raise ArgumentTypeError(f"expected {what} of {', '.join(names)}, found {text!r}")
        return text

    return parsed


def release(text: str) -> str:
    """What is written as a release; there need not be one."""
    if not RELEASE.fullmatch(text):
        raise ArgumentTypeError(f"expected a release such as 0.32.0, found {text!r}")
    return text


def settings(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ArgumentTypeError(f'expected a JSON object such as {{"seed": 1}}, found {text!r}')
    return found


def recorded(*names: str, of_jobs: str = "") -> Callable[[str], Path]:
    """A file that holds a JSON object with these names, as a command has written it.

    ``of_jobs``: a name that each of its jobs has, by which those of another command are told.
    """

    def parsed(text: str) -> Path:
        path = read(text)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        missing = [name for name in names if not isinstance(found, dict) or name not in found]
        if not isinstance(found, dict) or missing or not _have(found.get("jobs", ()), of_jobs):
            wanted = f" with {', '.join(names)}" if names else ""
            wanted += f", each of jobs with {of_jobs}" if of_jobs else ""
            raise ArgumentTypeError(f"expected a file of a JSON object{wanted}, found {text!r}")
        return path

    return parsed


def _have(jobs: Any, name: str) -> bool:
    return not name or all(isinstance(job, dict) and name in job for job in jobs)


def folder(text: str) -> Path:
    """A folder that is there."""
    path = Path(text)
    if not path.is_dir():
        raise ArgumentTypeError(f"expected a folder that is there, found {text!r}")
    return path


def model(text: str) -> Path:
    """The folder of a model."""
    path = folder(text)
    if not (path / "config.json").is_file():
        raise ArgumentTypeError(f"expected a folder with a model's config.json, found {text!r}")
    return path


def filled(text: str) -> Path:
    """A folder to write to, which is made if it is not there."""
    path = Path(text)
    if not _nearest(path).is_dir() or not os.access(_nearest(path), os.W_OK):
        raise ArgumentTypeError(f"expected a folder to write to or a new one, found {text!r}")
    return path


def _nearest(path: Path) -> Path:
    """The path itself or, as long as it is not there, the nearest folder that is."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
