"""Random runs over vLLM's own scheduler, for as long as is wanted.

Usage: python scripts/matrix random [RELEASE] [--shape SHAPE | --hits] [--seconds N] [--seed N]

The installed vLLM, or a release from its sources. Models have full attention, some beside a sliding
window; a SHAPE of tests/integration/engine/random_runs.py has other layers. Prints what the runs
have seen, and the seed and error of each that failed; `--seed N --seconds 0` repeats one. Status 1
if any failed. With `--hits` runs of all shapes compare what is hit with plain vLLM
(tests/integration/engine/random_hits.py).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from scripts import ROOT
from scripts.bench import arguments
from scripts.release.sources import fetch

FOLDER = ROOT / "tests/integration/engine"


def main() -> int:
    """Run the runs as a process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release", nargs="?", type=arguments.release, help="such as 0.22.1")
    parser.add_argument("--seconds", type=arguments.least_zero, default=600)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--shape", default="", help="such as state, connector, drafts+state")
    kind.add_argument("--hits", action="store_true", help="compare what is hit")
    args = parser.parse_args()
    runs = FOLDER / ("random_hits.py" if args.hits else "random_runs.py")
    command = [sys.executable, str(runs), str(args.seed), str(args.seconds)]
    command += [args.release, str(fetch(args.release))] if args.release else ["", ""]
    command += [args.shape] * bool(args.shape)
    # Nothing of the caller's own settings; the tier refuses names that it does not know.
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVOFFLOAD_")}
    env |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    return subprocess.run(command, env=env, check=False).returncode
