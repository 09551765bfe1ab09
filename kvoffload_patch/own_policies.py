"""Eviction policies of other packages, as entry points: their names, and what they are.

A package offers one in its metadata, and has to be installed for that; no variable names code.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

GROUP = "kvoffload_patch.policies"


def entry_points(name: str) -> list[Any]:
    """The entry points of this name, more than one if several packages have it."""
    every: Any = metadata.entry_points()
    if hasattr(every, "select"):
        return list(every.select(group=GROUP, name=name))
    return [one for one in every.get(GROUP, ()) if one.name == name]  # Python 3.9
