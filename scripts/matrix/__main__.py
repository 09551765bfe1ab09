"""Runs on many vLLM releases: python scripts/matrix COMMAND; see --help."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder, whose names hide others

from scripts import dispatch  # noqa: E402

COMMANDS = {
    "engines": ("engines", "real engines on the CPU, an environment for each release"),
    "scheduler": ("scheduler", "each release's own scheduler from its sources, with a faked model"),
    "random": ("random_runs", "random runs over the scheduler, for as long as is wanted"),
    "random-engines": ("random_engines", "random runs over real engines of the installed vLLM"),
    "own": ("own", "vLLM's own tests, plain, armed and with a tier"),
    "features": ("features", "every shape and feature on the installed release"),
    "pythons": ("pythons", "every Python: install the source archive, and run its tests there"),
    "gpu": ("gpu", "the installed release on a GPU"),
    "mutants": ("mutants", "small faults in a copy of the package: does a test notice each?"),
}

if __name__ == "__main__":
    sys.exit(dispatch("matrix", "Runs the tier on vLLM releases.", COMMANDS))
