"""python scripts/matrix pythons [PYTHON ...] [--out docs/measured/pythons.json]

Builds the source archive and unpacks it. Each Python installs it with its tests' requirements into
a new environment, runs `pip check`, and runs from the archive the tests that need neither torch nor
vLLM. Without any, all of python3.9 to python3.14 that are on PATH. Results are added to --out, and
the classifiers in setup.cfg are those Pythons (`tests/test_packaging.py`). What needs torch or
vLLM is run with the Python of `scripts/test`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.bench import arguments
from scripts.bench.common import machine, say, write_json

OUT = ROOT / "docs/measured/pythons.json"
NAMES = [f"python3.{minor}" for minor in range(9, 15)]
TESTS = ("tests/tier", "tests/patching", "tests/control", "tests/cli")
ALONE = "tests/test_*.py"
BUILD = "from setuptools import build_meta; build_meta.build_sdist({!r})"


def archive(folder: Path) -> Path:
    """The unpacked source archive, below a folder."""
    subprocess.run([sys.executable, "-c", BUILD.format(str(folder))], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    (file,) = folder.glob("*.tar.gz")
    with tarfile.open(file) as packed:
        packed.extractall(folder)
    return folder / file.name.removesuffix(".tar.gz")


def outcome(text: str, status: int) -> dict[str, Any]:
    """What pytest's last line says; `status` is that of its process."""
    last = text.strip().splitlines()[-1] if text.strip() else ""
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", last)}
    found = {name: counts.get(name, 0) for name in ("passed", "skipped", "failed", "errors")}
    return {**found, "green": status == 0 and found["passed"] > 0}


def try_one(python: str, source: Path, folder: Path) -> dict[str, Any]:
    """Install and test with one Python, in a new folder."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KVOFFLOAD"))}
        return subprocess.run(words, cwd=source, env=kept, text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip

    own = str(folder / "bin/python")
    installed = [
        run(python, "-m", "venv", str(folder)),
        run(own, "-m", "pip", "install", ".[test]"),
    ]
    if any(done.returncode for done in installed):
        return {"green": False, "error": installed[-1].stdout.strip()[-500:]}
    checked = run(own, "-m", "pip", "check")
    tests = [*TESTS, *sorted(str(path.relative_to(source)) for path in source.glob(ALONE))]
    done = run(own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    if done.returncode:
        say(done.stdout[-4000:])
    version = run(own, "-c", "import platform; print(platform.python_version())").stdout.strip()
    found = outcome(done.stdout, done.returncode)
    found["green"] = found["green"] and checked.returncode == 0
    return {"version": version, "pip_check": checked.stdout.strip(), **found}


def main() -> int:
    """Every Python; status 1 if one of them is not green."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pythons", nargs="*", type=_python, default=[n for n in NAMES if shutil.which(n)]
    )
    parser.add_argument("--out", type=_results, default=OUT)
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    about, bad = machine(), []
    with tempfile.TemporaryDirectory() as name:
        source = archive(Path(name))
        for number, python in enumerate(args.pythons):
            one = try_one(python, source, Path(name) / f"environment{number}")
            minor = ".".join(one.get("version", python).split(".")[:2])
            found[minor] = {**one, "date": about["date"][:10], "package": about["package"]}
            say(f"{minor}: {found[minor]}")
            if not one["green"]:
                bad.append(minor)
            write_json(args.out, dict(sorted(found.items(), key=_order)))
    return 1 if bad else 0


def _python(text: str) -> str:
    if shutil.which(text) is None:
        raise argparse.ArgumentTypeError(f"expected a Python on the PATH, found none for {text!r}")
    return text


def _results(text: str) -> Path:
    """What this command has written before, or a new file."""
    return arguments.recorded()(text) if Path(text).exists() else arguments.written(text)


def _order(item: tuple[str, Any]) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", item[0])]
