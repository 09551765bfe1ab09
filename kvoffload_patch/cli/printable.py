"""What engines and processes say of themselves, without what a terminal would obey."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def printable(found: Any) -> Any:
    """A text, or a value of JSON with all its texts: escapes stand for what cannot be seen.

    A client may have named a model or an adapter, and control characters of a name would move the
    cursor, or stand for lines that nobody has said.
    """
    if isinstance(found, str):
        return "".join(one if one.isprintable() else repr(one)[1:-1] for one in found)
    if isinstance(found, Mapping):
        return {printable(name): printable(value) for name, value in found.items()}
    if isinstance(found, list):
        return [printable(value) for value in found]
    return found
