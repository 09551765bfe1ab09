"""Runs the installed vLLM on a GPU with the tier and without, and writes one JSON result.

    python scripts/matrix gpu --out DIR
    python scripts/matrix gpu --record FILE   # one that was written elsewhere, to docs/measured

Plays `tests/engine/gpu_kinds.py`, which says what is compared, as a process of its own. Needs a GPU
and 20 s for each engine; ``--runners v1`` takes one runner only, ``--kinds "mla|drafts"`` the kinds
of engines whose name has one of these. Kinds beside kvcached are played with ``--kvcached`` only, a
folder with its source archive, which is then built for the PyTorch that is installed, or its wheel,
and the wheel of posix_ipc. Kinds beside LMCache, and by Ray, are left out where that cannot be
imported, the latter also where nothing can look like a second host; a line says so. Status 1 if
anything differs. Kinds that the folder's file has and this run has not played stay in it, with
their own date and commit. The file is written after each kind.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from scripts import REFUSED, ROOT, Refused
from scripts.bench import arguments
from scripts.matrix import results

PROGRAM = ROOT / "tests" / "engine" / "gpu_program.py"


def built(packages: Path, folder: Path) -> None:
    """kvcached, built and installed into a folder, without asking any index.

    Raises:
        Refused: pip has failed.
    """
    install = [sys.executable, "-m", "pip", "install", "--no-index", "--no-build-isolation"]
    install += ["--no-deps", "--find-links", str(packages), "--target", str(folder)]
    if subprocess.run(
        [*install, "posix_ipc", "kvcached"], stdout=sys.stderr, check=False
    ).returncode:
        raise Refused(f"expected packages of kvcached in {packages}, found what pip says above")


def play(
    runners: str, jobs: int, kinds: str, kvcached: Path | None = None
) -> Iterator[dict[str, Any]]:
    """What the program has found, after each kind; ``kvcached``: a folder that `built` has filled.

    Raises:
        Refused: it cannot use what it was given; its own error is above.
        SystemExit: it ended with another error, or without a result.
    """
    behind = filter(None, [os.environ.get("PYTHONPATH")])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), *behind])}
    if kvcached is not None:
        env["TEST_KVCACHED"] = str(kvcached)
    command = [sys.executable, str(PROGRAM), runners, str(jobs), kinds]
    found = False
    with subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        for line in program.stdout:
            if line.startswith("{"):
                found = True
                yield dict(json.loads(line))
    if program.returncode == REFUSED and not found:
        raise Refused(f"expected what {PROGRAM.name} can play, found what it says above")
    if program.returncode or not found:
        raise SystemExit(
            f"error: expected a result of {PROGRAM.name}, found status {program.returncode};"
            " see its message above."
        )


def main() -> int:
    """Compare every runner and graph mode; status 1 if any differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    to = parser.add_mutually_exclusive_group(required=True)
    to.add_argument("--out", type=arguments.filled, metavar="DIR")
    to.add_argument("--record", type=arguments.recorded("kind", "release", "tests"), metavar="FILE")
    parser.add_argument("--runners", type=_runners, default="v1,v2")
    parser.add_argument("--kinds", default="", help="those whose name has this; A|B: either")
    parser.add_argument("--jobs", type=arguments.whole(1), default=4, help="engines side by side")
    parser.add_argument("--kvcached", type=arguments.folder, metavar="DIR", help="its packages")
    parser.add_argument("--commit", default="", help="of the tree, where git is not at hand")
    args = parser.parse_args()
    if args.record:
        found: Iterable[dict[str, Any]] = [json.loads(args.record.read_text(encoding="utf-8"))]
    else:
        found = run(args)
    folder = results.FOLDER if args.record else args.out
    text, verdict = "", ""
    for result in found:
        result = results.joined(result, folder)
        result["verdict"] = verdict = _verdict(result["tests"])
        text = results.write(folder, result)
    print(text, end="")
    return int(verdict != "green")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is asked for, on the installed vLLM: the result after each kind."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if args.kvcached:
            built(args.kvcached, Path(folder))
        packages = args.kvcached and Path(folder)
        for played in play(args.runners, args.jobs, args.kinds, packages):
            yield {
                "kind": "gpu-engine",
                "python": ".".join(map(str, sys.version_info[:3])),
                **played,
                "seconds": round(time.monotonic() - began),
                **results.provenance(),
                **({"commit": args.commit} if args.commit else {}),
            }


def _runners(text: str) -> str:
    return ",".join(arguments.some(("v1", "v2"))(text))


def _verdict(tests: list[dict[str, Any]]) -> str:
    outcomes = {test["outcome"] for test in tests}
    return "green" if "passed" in outcomes and outcomes <= {"passed", "skipped"} else "red"
