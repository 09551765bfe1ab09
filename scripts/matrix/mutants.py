"""Small faults in a copy of the package, one at a time: does a test notice each?

    python scripts/matrix mutants                       # all: of `mutants_engine` and its like
    python scripts/matrix mutants watermark 'a ticket'  # those whose name has one of these
    python scripts/matrix mutants --json docs/measured/matrix/mutants.json

Package, tests and scripts are copied to a temporary folder, each fault is put into the copy, and
the tests that should notice it run there; the working tree is only read. The same tests run there
once without a fault. Status 1 if a fault survives, if its text is not in its file exactly once, or
if a test fails without it.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from scripts import ROOT
from scripts.bench import arguments
from scripts.bench.common import machine, say, write_json
from scripts.matrix import results
from scripts.matrix.mutants_connectors import CONNECTORS
from scripts.matrix.mutants_engine import ENGINE
from scripts.matrix.mutants_groups import GROUPS
from scripts.matrix.mutants_heads import HEADS
from scripts.matrix.mutants_list import MEMORY, TIER, TRANSFER, WORKER, Mutant
from scripts.matrix.mutants_loads import LOADS
from scripts.matrix.mutants_patching import PATCHING
from scripts.matrix.mutants_reports import REPORTS

# Those that take longest come first.
MUTANTS = (
    *ENGINE, *CONNECTORS, *GROUPS, *HEADS, *LOADS, *REPORTS, *WORKER, *TRANSFER, *TIER, *MEMORY,
    *PATCHING,
)  # fmt: skip
PACKAGE = "kvoffload_patch"
COPIED = (PACKAGE, "scripts", "tests", "pyproject.toml")
PYTEST = ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider")
TIMEOUT_S, ALL_TIMEOUT_S = 300, 1200  # of a fault, and of all tests without one
NOTICED, SURVIVES, NOT_RUN = "noticed", "survives", "not run"
_SECONDS = count(1)  # since 1970
_TESTS_FAILED = 1  # pytest's status
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - (.*))?$", re.MULTILINE)


def wrong(mutants: Sequence[Mutant], root: Path) -> list[str]:
    """What of a list does not fit the tree, in a sentence each; cheap."""
    names = Counter(mutant.name for mutant in mutants)
    found = [f"{name}: expected one fault of this name" for name, n in names.items() if n > 1]
    for mutant in mutants:
        found += [f"{mutant.name}: {text}" for text in _complaints(mutant, root)]
    return found


def _complaints(mutant: Mutant, root: Path) -> Iterator[str]:
    file = root / PACKAGE / mutant.file
    source = file.read_text(encoding="utf-8") if file.is_file() else ""
    times = source.count(mutant.text)
    if times != 1:
        yield f"expected its text in {mutant.file} once, found it {times} times"
    else:
        try:
            changed = ast.dump(ast.parse(_broken(source, mutant))) != ast.dump(ast.parse(source))
        except SyntaxError:
            yield "expected Python with what stands instead, found none"
        else:
            if not changed:
                yield "expected other code with what stands instead, found the same"
    for test in mutant.tests:
        path, _, name = test.partition("::")
        path = root / "tests" / path
        if not path.is_file() or (name and f"def {name}(" not in path.read_text(encoding="utf-8")):
            yield f"expected a test {test}, found none"


def _broken(source: str, mutant: Mutant) -> str:
    return source.replace(mutant.text, mutant.instead)


class Copies:
    """Copies of the tree, one for each run at a time.

    Args:
        root: of the tree.
        folder: takes the copies.
        count: of the copies.
    """

    def __init__(self, root: Path, folder: Path, count: int) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        for number in range(count):
            self._free.put(_copy(root, folder / str(number)))

    @contextmanager
    def one(self) -> Iterator[Path]:
        """A copy that nobody else uses meanwhile."""
        copy = self._free.get()
        try:
            yield copy
        finally:
            self._free.put(copy)

    def try_one(self, mutant: Mutant) -> dict[str, Any]:
        """Put a fault into a copy and run its tests: the outcome, and which test failed."""
        began = time.monotonic()
        with self.one() as copy:
            file = copy / PACKAGE / mutant.file
            source = file.read_text(encoding="utf-8")
            _write(file, _broken(source, mutant))
            try:
                status, said = _test(copy, mutant.tests, "-x", timeout_s=TIMEOUT_S)
            finally:
                _write(file, source)
        seconds = round(time.monotonic() - began, 1)
        found = {"name": mutant.name, "file": mutant.file, **outcome(status, said)}
        return {**found, "seconds": seconds}

    def try_none(self, mutants: Sequence[Mutant]) -> dict[str, Any]:
        """Run all their tests without a fault."""
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        with self.one() as copy:
            status, said = _test(copy, tests, timeout_s=ALL_TIMEOUT_S)
        failed = [f"{test}: {why}" for test, why in _FAILED.findall(said)]
        return {"status": status, "failed": failed, "said": _last(said)}


def _write(file: Path, source: str) -> None:
    """With a time that the file never had: by that, and its size, Python knows old bytecode."""
    file.write_text(source, encoding="utf-8")
    second = next(_SECONDS)
    os.utime(file, (second, second))


def _copy(root: Path, to: Path) -> Path:
    """Of what tests of the package read, as it is now."""
    to.mkdir(parents=True)
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(root / name, to / name)
    return to


def _test(copy: Path, tests: Iterable[str], *more: str, timeout_s: float) -> tuple[int, str]:
    """Run tests on a copy; pytest's status and what it said."""
    # Nothing of the caller's own settings; the tier refuses names that it does not know.
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVOFFLOAD_")}
    env |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    env["COLUMNS"] = "300"  # else pytest leaves out why a test failed
    command = [sys.executable, *PYTEST, *more, *(f"tests/{test}" for test in tests)]
    try:
        done = subprocess.run(
            command, cwd=copy, env=env, text=True, check=False, timeout=timeout_s,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return -1, f"the tests took more than {timeout_s:.0f} s"
    return done.returncode, done.stdout


def outcome(status: int, said: str) -> dict[str, str]:
    """What pytest's status and words come to."""
    failed = _FAILED.search(said)
    if status == _TESTS_FAILED and failed:
        return {"outcome": NOTICED, "by": failed[1], "why": failed[2] or ""}
    return {"outcome": SURVIVES if status == 0 else NOT_RUN, "why": _last(said)}


def _last(said: str) -> str:
    lines = said.strip().splitlines()
    return lines[-1] if lines else ""


def run(mutants: Sequence[Mutant], jobs: int, root: Path) -> dict[str, Any]:
    """Try every mutant, so many at a time, and say what comes out."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        copies = Copies(root, Path(folder), jobs)
        clean = pool.submit(copies.try_none, mutants)
        tried = []
        for one in pool.map(copies.try_one, mutants):
            tried.append(one)
            say(f"{one['outcome']:8} {one['seconds']:5.1f} s  {one['name']}:"
                f" {one.get('by') or one['why']}")  # fmt: skip
        return {"clean": clean.result(), "mutants": tried}


def verdict(found: dict[str, Any]) -> tuple[bool, str]:
    """Whether every fault was noticed, by tests that pass without it; and that in words."""
    tried, clean = found["mutants"], found["clean"]
    noticed = sum(one["outcome"] == NOTICED for one in tried)
    line = f"{noticed} of {len(tried)} noticed; without a fault: {clean['said']}"
    return noticed == len(tried) > 0 and clean["status"] == 0, line


def main() -> int:
    """Try the mutants of the command line, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="words of names; default: all")
    parser.add_argument("--json", type=arguments.written, help="file for the result")
    parser.add_argument("--jobs", type=arguments.whole(1), default=min(4, os.cpu_count() or 1))
    args = parser.parse_args()
    if args.names and args.json:
        parser.error("--json is for a run of all")
    for name in args.names:
        if not any(name in mutant.name for mutant in MUTANTS):
            parser.error(f"expected words that names of faults have, found {name!r}")
    chosen = [m for m in MUTANTS if not args.names or any(name in m.name for name in args.names)]
    if faults := wrong(MUTANTS, ROOT):
        say("\n".join(faults))
        return 1
    began = time.monotonic()
    found = run(chosen, args.jobs, ROOT)
    well, line = verdict(found)
    say(line)
    for test in found["clean"]["failed"]:
        say(f"fails without a fault: {test}")
    seconds = {"seconds": round(time.monotonic() - began), "cpu_seconds": round(_cpu_seconds())}
    about = {**machine(), **results.provenance("tests", "scripts/matrix"), "jobs": args.jobs}
    write_json(args.json, {**about, **seconds, **found})
    return int(not well)


def _cpu_seconds() -> float:
    """Of all processes so far; unlike time it hardly depends on what else the machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
