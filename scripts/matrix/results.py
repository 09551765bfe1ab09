"""What the matrix's commands write: one JSON file for each release and kind of run, and mutants."""

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
    "served-engine": "served",
    "gpu-engine": "gpu",
    "scheduler": "scheduler",
    "own-tests": "own",
}
MUTANTS = "mutants.json"  # beside them: it is of this package's own tests
_TESTS_FAILED = 1  # pytest's status


def provenance(*more: str) -> dict[str, str]:
    """When a result was made, and of which commit; with a plus if what is run differs from it.

    ``more``: what is run besides the package and tests of releases.
    """
    played = ("kvoffload_patch", "tests/engine", "tests/scheduler_half", *more)
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
    file_of(folder, result).write_text(text, encoding="utf-8")
    return text


def files(folder: Path = FOLDER) -> list[Path]:
    """Those of releases, in the order of their names."""
    return [file for file in sorted(folder.glob("*.json")) if file.name != MUTANTS]


def dated(result: dict[str, Any], test: dict[str, Any]) -> dict[str, Any]:
    """A test with its own date and commit: its file's, unless it is of an earlier run."""
    return {"date": result["date"], "commit": result["commit"], **test}


def joined(new: dict[str, Any], folder: Path = FOLDER) -> dict[str, Any]:
    """A result with the tests of the file there that it has not played.

    Each keeps the date, the commit and the device that it was played on. So kinds of engines that
    take other machines are not lost when the rest is played again.
    """
    file = file_of(folder, new)
    if not file.exists():
        return new
    old = json.loads(file.read_text(encoding="utf-8"))
    played = {test["name"] for test in new["tests"]}
    device = {"device": old["device"]} if "device" in old else {}
    kept = [{**device, **dated(old, t)} for t in old["tests"] if t["name"] not in played]
    return {
        **new,
        "runners": sorted({*old.get("runners", []), *new.get("runners", [])}),
        "tests": [*new["tests"], *kept],
    }


def with_the_rest(new: dict[str, Any], folder: Path = FOLDER) -> dict[str, Any]:
    """A result of some tests, put into the file there, which is of all.

    These have a date and a commit of their own. What the file says of the run as a whole, such as
    how many tokens were compared, stays that of the whole run, with its date and commit.
    """
    file = file_of(folder, new)
    if not file.exists():
        return new
    old = json.loads(file.read_text(encoding="utf-8"))
    played = {test["name"]: dated(new, test) for test in new["tests"]}
    tests = [played.pop(test["name"], test) for test in old["tests"]]
    # Which tests failed, and still do, their outcomes say.
    before = 0 if old["pytest_status"] == _TESTS_FAILED else old["pytest_status"]
    status = new["pytest_status"] or before
    return {**old, "tests": [*tests, *played.values()], "pytest_status": status}


def file_of(folder: Path, result: dict[str, Any]) -> Path:
    """Where a result of this kind and release is, or would be."""
    return folder / f"{KINDS[result['kind']]}-{result['release']}.json"
