"""What the matrix's commands write: one JSON file for each release and kind of run."""

from __future__ import annotations

import json
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from scripts import ROOT

FOLDER = ROOT / "docs" / "measured" / "matrix"
# Each kind of run, and what its files' names begin with.
KINDS = {
    "cpu-engine": "cpu",
    "gpu-engine": "gpu",
    "scheduler": "scheduler",
    "own-tests": "own",
}


def provenance() -> dict[str, str]:
    """When a result was made, and of which commit; with a plus if what is run differs from it."""
    played = ("kvoffload_patch", "tests/engine", "tests/scheduler_half")
    changed = "+" if _git("status", "--porcelain", "--", *played) else ""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": _git("rev-parse", "--short", "HEAD") + changed,
    }


def _git(*args: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *args], text=True, capture_output=True)
    return done.stdout.strip()


def write(folder: Path, result: dict[str, Any]) -> str:
    """Write a result to the file of its kind and release; returns the file's text."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1) + "\n"
    file = folder / f"{KINDS[result['kind']]}-{result['release']}.json"
    file.write_text(text, encoding="utf-8")
    return text
