"""Replays every generated trace with every side, three seeds each, and writes what came of them.

The results are those of docs/policies.md, which `page` makes from them. A replay has the same
result wherever it runs: with --sides those of the others are kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from scripts import Refused
from scripts.bench import arguments
from scripts.bench.common import write_json
from scripts.simulate import parallel, report, sides, workloads
from scripts.simulate.belady import most_hits
from scripts.simulate.model import Machine, Model
from scripts.simulate.page import RESULTS

SEEDS = (0, 1, 2)


def replayed(job: tuple[str, str, int, float]) -> dict[str, Any]:
    """Figures of one trace and one side, blocks as counted; the optimum has hits alone."""
    name, side, seed, seconds = job
    machine = Machine()
    trace = workloads.generate(name, seconds, seed)
    row: dict[str, Any] = {"trace": name, "side": side, "seed": seed, "requests": len(trace)}
    if side == sides.OPTIMUM:
        room = machine.gpu_blocks + machine.cpu_blocks
        hits, reusable = most_hits(trace, room, machine.block_tokens)
        return {**row, "reusable": reusable, "hits": hits, "again": reusable - hits}
    return {**row, **report.figures(Model(machine, sides.SIDES[side].rules(machine), trace))}


def measure(seconds: float, seeds: Iterable[int], names: Iterable[str]) -> dict[str, Any]:
    """These sides, on as many cores as there are, with a line on stderr for each replay."""
    jobs = [
        (name, side, seed, seconds)
        for name in workloads.WORKLOADS
        for side in names
        for seed in seeds
    ]
    return parallel.measured(replayed, jobs, seconds)


def kept(path: Path, seconds: float, names: Collection[str]) -> list[dict[str, Any]]:
    """Rows of these sides that were measured before.

    Raises:
        Refused: there are none, or of another model, or of traces of another length.
    """
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        for name, wanted in (("model", Machine()._asdict()), ("seconds", seconds)):
            if before[name] != wanted:
                raise Refused(f"{name} {before[name]} in place of {wanted}")
        return [row for row in before["rows"] if row["side"] in names]
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise Refused(
            f"argument --out: {path}: expected results of this command, whose other sides are "
            f"kept, found {found}; --alone keeps none"
        ) from None


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=arguments.target, default=RESULTS)
    parser.add_argument("--seconds", type=arguments.positive, default=1800.0, help="of each")
    every = (*sides.SIDES, sides.OPTIMUM)
    parser.add_argument("--sides", nargs="+", choices=every, default=every)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="of the traces")
    parser.add_argument("--alone", action="store_true", help="keep no results of other sides")
    options = parser.parse_args()
    others = set(every).difference(options.sides)
    before: list[dict[str, Any]] = []
    if others and not options.alone:  # before the replays, which take minutes
        before = kept(options.out, options.seconds, others)
    found = measure(options.seconds, options.seeds, options.sides)
    found["rows"] += before
    write_json(options.out, found)
    return 0
