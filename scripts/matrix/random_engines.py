"""Random runs over real engines of the installed vLLM on the CPU, for as long as is wanted.

Usage: python scripts/matrix random-engines [--seconds N] [--seed N]

Where `random` has a faked model, these engines compute, and are asked for structured output,
several samples, stop strings, likelihoods, embeddings and images as well, with adapters, sessions
and drafts, some of them beside a KV connector, with windows or on two ranks. Meanwhile requests are
aborted, and the engine is paused, sleeps, is reset, or gets other weights or adapters
(tests/engine/random_plan.py). Each answer is compared with plain vLLM's. Prints what the runs have
seen and what they never did, and the seed and differences of each that failed; `--seed N --seconds
0` repeats one. Status 1 if any failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from scripts import ROOT
from scripts.bench import arguments

RUNS = ROOT / "tests/engine/random_engines.py"


def main() -> int:
    """Run the runs as a process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=arguments.least_zero, default=600)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    args = parser.parse_args()
    command = [sys.executable, str(RUNS), str(args.seed), str(args.seconds)]
    return subprocess.run(command, check=False).returncode
