"""What to keep and what to move, without a GPU: python scripts/simulate COMMAND; see --help."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder, whose names hide others

from scripts import dispatch  # noqa: E402

COMMANDS = {
    "replay": ("replay", "every policy on a trace, from a file or generated, beside the optimum"),
    "generate": ("generate", "write a generated trace as JSON lines"),
    "measure": ("measure", "every policy on every generated trace, three seeds each; minutes"),
    "public": ("public", "every policy on a published trace, from its file; minutes"),
    "growth": ("growth", "what is kept while the tier grows, on every generated trace; minutes"),
    "loads": ("loads", "load or recompute, and loads ahead of run slots, in figures; minutes"),
    "heads": ("heads", "heads of prefixes on the GPU beside whole ones; minutes"),
    "tuned": ("tuned", "other values of a number that tunes the tier, on every generated trace"),
    "scale": ("scale", "what a block costs the engine's thread, up to a million slots"),
    "page": ("page", "write the tables and the picture of docs/policies.md from these"),
}

if __name__ == "__main__":
    sys.exit(dispatch("simulate", "Replays request traces through the tier.", COMMANDS))
