"""A server under random traffic for a given time: python scripts/soak COMMAND; see --help."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder, whose names hide others

from scripts import dispatch  # noqa: E402

COMMANDS = {
    "run": ("run", "drives a server with the tier, and checks every answer against plain vLLM's"),
    "signals": ("signals", "TERM, INT and KILL of each process in each phase, beside plain vLLM"),
    "fuzz": ("fuzz", "made-up settings, patch files and control messages, with atheris"),
    "page": ("page", "writes docs/reliability.md and its pictures from recorded runs"),
}

if __name__ == "__main__":
    sys.exit(dispatch("soak", "Long runs that show whether the tier can be trusted.", COMMANDS))
