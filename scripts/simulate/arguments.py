"""What the commands of this folder take: each function is the `type` of a kind of argument."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable
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
