"""When results of docs/features.md were made, and of which trees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from scripts.matrix.features_row import Row

_CHANGED = "+"  # behind a commit, see `results.provenance`
_INTRODUCTION = """
## Results of changed files

A plus behind a commit: the package, `tests/engine` or `tests/scheduler_half` had changes that were
in no commit when these rows were run, so nobody can run them again as they were.
"""


def dates(found: Iterable[dict[str, Any]]) -> str:
    """The oldest and the newest of these results, or the date of all."""
    oldest, *others = sorted({result["date"] for result in found})
    return f"{oldest} to {others[-1]}" if others else str(oldest)


def changed(rows: Sequence[Row], places: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """The lines of the page that name results of trees with changes, by place and commit.

    Args:
        rows: those to tell of.
        places: of each, such as a release, the results by row.
    """
    told: dict[tuple[str, str], list[str]] = {}
    for place, found in places.items():
        for row in rows:
            commit = found.get(row.name, {}).get("commit", "")
            if commit.endswith(_CHANGED):
                told.setdefault((place, commit), []).append(row.name)
    if not told:
        return []
    return [
        *_INTRODUCTION.splitlines(),
        "",
        *(f"- {place}, {commit}: {'; '.join(names)}" for (place, commit), names in told.items()),
    ]
