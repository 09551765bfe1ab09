"""Eviction policies by name: those of this package, and those of others, as entry points.

Names alone: what parses configuration, in every process, imports no policy. A package offers one of
its own in its metadata, and has to be installed for that; no variable names code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

GROUP = "kvoffload_patch.policies"


class Row(NamedTuple):
    """A policy of this package: its class, and what leaves first by it."""

    kind: str
    words: str


# Each is a module of this name in `tier/policies`, with this class.
POLICIES: dict[str, Row] = {
    "adaptive": Row("AdaptivePolicy", "as lru or as arc, whichever recomputes less"),
    "arc": Row("ArcPolicy", "of those used once and those used again whichever are missed less"),
    "lru": Row("LRUPolicy", "the least recently used"),
    "s3fifo": Row("S3FifoPolicy", "those not used again soon after they were stored"),
}


def entry_points(name: str) -> list[Any]:
    """The entry points of this name, more than one if several packages have it."""
    from importlib import metadata  # seldom needed, and it takes a while

    every: Any = metadata.entry_points()
    if hasattr(every, "select"):
        return list(every.select(group=GROUP, name=name))
    return [one for one in every.get(GROUP, ()) if one.name == name]  # Python 3.9
