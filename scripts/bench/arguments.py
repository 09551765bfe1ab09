"""What commands take: each function is the `type` of a kind of argument, or returns one."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from pathlib import Path


def whole(least: int) -> Callable[[str], int]:
    """A whole number, no less than that."""

    def parsed(text: str) -> int:
        try:
            number = int(text)
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
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ArgumentTypeError(f"expected a finite number above 0, found {text!r}")
    return number


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
    there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    if path.is_dir() or not (there.is_dir() or there == path.absolute()):
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
