"""Runs the installed vLLM on a GPU with the tier and without, and writes one JSON result.

    python scripts/matrix gpu --out DIR

Plays `tests/engine/gpu_kinds.py`, which says what is compared, as a process of its own. Needs a GPU
and 20 s for each engine; ``--runners v1`` takes one runner only, ``--kinds mla,drafts`` the kinds
of engines whose name has one of these. Status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.matrix import results

PROGRAM = ROOT / "tests" / "engine" / "gpu_kinds.py"


def play(runners: str, jobs: int, kinds: str) -> dict[str, Any]:
    """What the program printed.

    Raises:
        SystemExit: it ended without a result; its own error is above.
    """
    behind = filter(None, [os.environ.get("PYTHONPATH")])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), *behind])}
    command = [sys.executable, str(PROGRAM), runners, str(jobs), kinds]
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(
            f"error: expected a result of {PROGRAM.name}, found status {done.returncode};"
            " see its message above."
        )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    """Compare every runner and graph mode; status 1 if any differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--runners", default="v1,v2")
    parser.add_argument("--kinds", default="", help="parts of names; the default takes all")
    parser.add_argument("--jobs", type=int, default=4, help="engines side by side")
    parser.add_argument("--commit", default="", help="of the tree, where git is not at hand")
    args = parser.parse_args()
    began = time.monotonic()
    played = play(args.runners, args.jobs, args.kinds)
    green = all(one["outcome"] == "passed" for one in played["tests"])
    result = {
        "kind": "gpu-engine",
        "python": ".".join(map(str, sys.version_info[:3])),
        **played,
        "seconds": round(time.monotonic() - began),
        **results.provenance(),
        **({"commit": args.commit} if args.commit else {}),
        "verdict": "green" if green else "red",
    }
    print(results.write(args.out, result), end="")
    return int(not green)
