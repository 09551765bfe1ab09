"""The scheduler half of vLLM releases: their own scheduler, a model that is arithmetic, our tier.

Usage: python scripts/matrix scheduler [RELEASE ...] [--json DIR] [--jobs N]

Without a release, all that the patch table supports. Each runs from its sources
(`scripts/release sources`), in a process of its own; none is installed. What they depend on must be
in this environment: that of any recent release will do. Status 1 if any is not green.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Any

from kvoffload_patch.integration.patch_table.verified import RELEASES
from scripts import ROOT
from scripts.bench import arguments
from scripts.matrix import results
from scripts.release.sources import NotFetched, fetch_all

HALF = ROOT / "tests/scheduler_half/half.py"


def play(release: str) -> dict[str, Any]:
    """All scenarios on a release: what came out, as this script writes it.

    Raises:
        NotFetched: its sources could not be had.
    """
    ((_, result, why),) = play_all([release], 1)
    if result is None:
        raise NotFetched(why)
    return result


def failed(scenarios: dict[str, Any]) -> dict[str, str]:
    """Why scenarios failed, by name."""
    return {name: one["why"] for name, one in scenarios.items() if one["outcome"] == "failed"}


def play_all(
    releases: Iterable[str], jobs: int
) -> Iterator[tuple[str, dict[str, Any] | None, str]]:
    """Each release, what came out, and if nothing did, why not; in the order that they are done."""
    words = []
    for release, folder, why_not in fetch_all(releases):
        if folder is None:
            yield release, None, why_not
        else:
            words.append(f"{release}={folder}")
    # Nothing of the caller's own settings; the tier refuses names that it does not know.
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVOFFLOAD_")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(HALF), str(jobs), *words]
    made = results.provenance()
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, env=env) as process:
        try:
            for line in process.stdout or ():
                found = json.loads(line)
                yield found["release"], _result(made, **found), ""
        finally:
            process.terminate()


def _result(made: dict[str, str], release: str, scenarios: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "scheduler",
        "release": release,
        "torch": metadata.version("torch"),
        "python": ".".join(map(str, sys.version_info[:3])),
        **made,
        "scenarios": scenarios,
        "verdict": "red" if failed(scenarios) else "green",
    }


def main() -> int:
    """Play, print a line for each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "releases",
        nargs="*",
        type=arguments.release,
        help="such as 0.9.1; default: all supported ones",
    )
    parser.add_argument("--json", type=arguments.filled, help="folder for one result per release")
    parser.add_argument("--jobs", type=arguments.whole(1), default=os.cpu_count() or 1)
    args = parser.parse_args()
    red = False
    for release, result, why in play_all(args.releases or RELEASES, args.jobs):
        if result is None:
            red = True
            print(f"{release}: not run: {why}", flush=True)
            continue
        red |= result["verdict"] != "green"
        passed = sum(one["outcome"] == "passed" for one in result["scenarios"].values())
        print(f"{release}: {result['verdict']}, {passed} scenarios passed", flush=True)
        for name, text in failed(result["scenarios"]).items():
            print(f"  {name}: {text.strip().splitlines()[-1]}", flush=True)
        if args.json:
            results.write(args.json, result)
    return int(red)
