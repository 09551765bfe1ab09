"""Numbers of a `tuning.py` that are given other values for a measurement."""

from __future__ import annotations

import importlib
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

LAYERS = ("integration.engine", "integration.worker", "tier", "transfer")
READERS = ("kvoffload_patch.", "scripts.")


class Varied(NamedTuple):
    """A number, and the values that it is given in turn."""

    name: str
    values: Sequence[float]


def tuning_of(name: str) -> ModuleType:
    """The `tuning.py` that has a number.

    Raises:
        ValueError: none has it.
    """
    for layer in LAYERS:
        module = importlib.import_module(f"kvoffload_patch.{layer}.tuning")
        if type(getattr(module, name, None)) in (int, float):
            return module
    raise ValueError(f"expected a number of a tuning.py, found {name!r}")


@contextmanager
def varied(name: str, value: float) -> Iterator[None]:
    """A number has this value in all modules that have read it.

    Raises:
        ValueError: no `tuning.py` has it.
    """
    own = getattr(tuning_of(name), name)
    before = _readers()
    # Another module may have a number of its own by this name.
    changed = [module for module in before if module.__dict__.get(name) == own]
    for module in changed:
        setattr(module, name, value)
    try:
        yield
    finally:
        # What was imported meanwhile has read the other value.
        changed += [m for m in _readers() if m not in before and name in m.__dict__]
        for module in changed:
            setattr(module, name, own)


def _readers() -> list[ModuleType]:
    return [module for path, module in list(sys.modules.items()) if path.startswith(READERS)]


def asked(text: str) -> Varied:
    """NAME=VALUE,VALUE of a command line."""
    name, _, values = text.partition("=")
    try:
        tuning_of(name)
        return Varied(name, [_number(value) for value in values.split(",")])
    except ValueError as error:
        raise ArgumentTypeError(f"expected NAME=VALUE,VALUE: {error}") from None


def _number(text: str) -> float:
    return float(text) if "." in text else int(text)
