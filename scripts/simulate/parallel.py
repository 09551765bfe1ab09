"""Replays on as many cores as there are, and the document that they make."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from scripts.bench import arguments
from scripts.bench.common import machine, write_json
from scripts.simulate.model import Machine

Job = TypeVar("Job")


def measured(
    replayed: Callable[[Job], dict[str, Any]],
    jobs: Sequence[Job],
    seconds: float | None,
    model: Machine = Machine(),  # noqa: B008 - it cannot be changed
) -> dict[str, Any]:
    """A row for each job, in their order, with a line on stderr for each as it is done.

    Args:
        replayed: of a module, so that other processes can call it.
        jobs: one for each row.
        seconds: of each generated trace.
        model: what they are replayed on, unless a row says otherwise.
    """
    rows = []
    with ProcessPoolExecutor() as pool:
        for number, (job, row) in enumerate(zip(jobs, pool.map(replayed, jobs)), 1):
            rows.append(row)
            print(f"{number} of {len(jobs)}: {job}", file=sys.stderr, flush=True)
    return {"machine": machine(), "model": model._asdict(), "seconds": seconds, "rows": rows}


def write(about: str, out: Path, measure: Callable[[float], dict[str, Any]]) -> int:
    """Measure and write, as the command line of a module says; returns the exit status.

    Args:
        about: the module's docstring.
        out: where to, unless the command line names another file.
        measure: called with the seconds of each trace.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=arguments.target, default=out)
    parser.add_argument("--seconds", type=arguments.positive, default=1800.0, help="of each trace")
    options = parser.parse_args()
    write_json(options.out, measure(options.seconds))
    return 0
