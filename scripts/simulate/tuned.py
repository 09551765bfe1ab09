"""Replays every generated trace with other values of a number that tunes the tier.

The numbers are those of `kvoffload_patch/tier/tuning.py`. Each figure is beside that of the first
value: give the one that it has.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from scripts.bench import arguments
from scripts.bench.common import table
from scripts.bench.varied import Varied, asked, varied
from scripts.simulate import heads, measure, parallel, sides, workloads
from scripts.simulate.spread import by_seed, change

FIGURES = {"again": "recomputed", "stored": "stored", "loaded": "loaded"}
FIGURES["first_token_mean"] = "first token, mean"
HEADS = "heads"
Job = tuple[str, float, str, str, int, float]


def replayed(job: Job) -> dict[str, Any]:
    """Figures of one value, side, trace and seed."""
    name, value, side, trace, seed, seconds = job
    with varied(name, value):
        if side == HEADS:
            row = heads.replayed((trace, "auto", seed, seconds))
        else:
            row = measure.replayed((trace, side, seed, seconds))
    return {**row, "side": side, "value": value}


def report(rows: Sequence[dict[str, Any]], number: Varied) -> str:
    """A table for each side: a row for each trace, figure and other value."""
    parts = []
    for side in dict.fromkeys(row["side"] for row in rows):
        lines = [[f"{number.name}, {side}", *map(str, number.values)]]
        for trace in dict.fromkeys(row["trace"] for row in rows):
            these = [row for row in rows if (row["side"], row["trace"]) == (side, trace)]
            told = [figure for figure in FIGURES if figure in these[0]]
            lines += [_line(these, trace, figure, number.values) for figure in told]
        parts.append(table(lines))
    return "\n\n".join(parts)


def _line(
    rows: Sequence[dict[str, Any]], trace: str, figure: str, values: Sequence[float]
) -> list[str]:
    found = [by_seed([r for r in rows if r["value"] == value], figure) for value in values]
    base = found[0]
    cells = [change(one, base) if all(base) else f"{sum(one):,.6g}" for one in found[1:]]
    return [f"{trace}: {FIGURES[figure]}", f"{sum(base):,.6g}", *cells]


def main() -> int:
    """Replay, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("number", type=asked, metavar="NAME=VALUE,VALUE")
    known = (*sides.SIDES, HEADS)
    parser.add_argument("--sides", nargs="+", choices=known, default=["auto-adaptive"])
    parser.add_argument("--seeds", nargs="+", type=int, default=measure.SEEDS)
    parser.add_argument("--seconds", type=arguments.positive, default=1800.0, help="of each trace")
    options = parser.parse_args()
    number = options.number
    jobs: list[Job] = [
        (number.name, value, side, trace, seed, options.seconds)
        for side in options.sides
        for trace in (*(workloads.IN_TURNS if side == HEADS else ()), *workloads.WORKLOADS)
        for value in number.values
        for seed in options.seeds
    ]
    print(report(parallel.measured(replayed, jobs, options.seconds)["rows"], number))
    return 0
