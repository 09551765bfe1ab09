"""What of the package a test has replaced, in the process that runs the others as well."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_PACKAGE = "kvoffload_patch"


def package() -> dict[str, Any]:
    """Functions, classes and constants of the package's modules, and what its classes define."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE and isinstance(module, ModuleType):
            for path, value in _defined(name, module):
                found[path] = value
    return found


def since(before: dict[str, Any]) -> list[str]:
    """Names of what is another object now; what was imported meanwhile is no difference."""
    now = package()
    return sorted(path for path in before if now.get(path) is not before[path])


def _defined(name: str, module: ModuleType) -> Iterator[tuple[str, Any]]:
    for key, value in list(vars(module).items()):
        if callable(value) or key.isupper():
            yield f"{name}.{key}", value
        if isinstance(value, type) and value.__module__ == name:
            for attribute, kept in list(vars(value).items()):
                if not attribute.startswith("__"):
                    yield f"{name}.{key}.{attribute}", kept
