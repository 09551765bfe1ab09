"""A figure of several seeds beside that of another side on the same traces, as tables have it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def by_seed(rows: Iterable[Mapping[str, Any]], figure: str) -> list[float]:
    """A figure of each seed, in the order of the seeds."""
    return [row[figure] for row in sorted(rows, key=lambda row: row["seed"])]


def change(ours: Sequence[float], base: Sequence[float], places: int = 1) -> str:
    """How much more ours are than those of the base, as "-10.1 % (-12.0 to +1.3)".

    Args:
        ours: of each seed.
        base: of the same seeds, none of them 0.
        places: behind the point.

    Returns:
        That of all seeds together, and in brackets the least and the most of one.
    """
    each = [100 * (one / other - 1) for one, other in zip(ours, base)]
    whole = 100 * (sum(ours) / sum(base) - 1)
    least, most = (f"{one:+.{places}f}" for one in (min(each), max(each)))
    return f"{whole:+.{places}f} % ({least} to {most})"
