"""The figures of a replay, as results have them and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from scripts.bench.common import GIB, quantile, table
from scripts.simulate.model import Figures, Machine, Model
from scripts.simulate.sides import OPTIMUM, SIDES

HEAD = (
    "", "hit rate, %", "of it tier, %", "recomputed, k tokens", "stored, GiB", "loaded, GiB",
    "orphans, %", "first token, mean s", "p95 s", "preempted", "recomputed for that, k tokens",
)  # fmt: skip


def rows(
    found: Mapping[str, Figures], best: tuple[int, int] | None, machine: Machine
) -> list[list[str]]:
    """A row for each side, and the optimum's.

    Args:
        found: figures by side.
        best: blocks that the optimum finds, and those that could be found; None: not known.
        machine: what they were found on.
    """
    lines = [list(HEAD), *(_row(SIDES[name].words, f, machine) for name, f in found.items())]
    if best is not None:
        hits, reusable = best
        again = _thousands((reusable - hits) * machine.block_tokens)
        lines.append([OPTIMUM, _percent(hits, reusable), "-", again, *["-"] * 7])
    return lines


def as_table(found: Mapping[str, Figures], best: tuple[int, int] | None, machine: Machine) -> str:
    """The rows as Markdown."""
    return table(rows(found, best, machine))


def figures(model: Model) -> dict[str, Any]:
    """What comes of a replay, blocks as counted."""
    found = model.run()
    return {
        "reusable": found.reusable,
        "hits": found.hits_gpu + found.hits_tier,
        "hits_tier": found.hits_tier,
        "again": found.again,
        "stored": found.stored,
        "loaded": found.loaded,
        "orphans": round(found.orphans, 5),
        "first_token_mean": round(statistics.fmean(found.first_token), 4),
        "first_token_p95": round(quantile(found.first_token, 0.95), 4),
    }


def _row(words: str, figures: Figures, machine: Machine) -> list[str]:
    gib = machine.block_tokens * machine.token_bytes / GIB
    hits = figures.hits_gpu + figures.hits_tier
    return [
        words,
        _percent(hits, figures.reusable),
        _percent(figures.hits_tier, figures.reusable),
        _thousands(figures.again * machine.block_tokens),
        f"{figures.stored * gib:,.0f}",
        f"{figures.loaded * gib:,.0f}",
        f"{100 * figures.orphans:.1f}",
        f"{statistics.fmean(figures.first_token):.2f}",
        f"{quantile(figures.first_token, 0.95):.2f}",
        str(figures.preempted),
        _thousands(figures.lost * machine.block_tokens),
    ]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"


def _thousands(tokens: int) -> str:
    return f"{tokens / 1000:,.0f}"
