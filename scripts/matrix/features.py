"""Runs the tests of each shape and feature on the installed vLLM, and writes docs/features.md.

    python scripts/matrix features                  # all rows, then the page
    python scripts/matrix features --select states  # only rows whose name has this; others stay
    python scripts/matrix features --page           # the page only, from the results
    python scripts/matrix features --check          # status 1 if it is not what this would write

Results are in docs/measured/features.json: for each row the tests that were run, with their
outcomes, the release, the date and the commit. A refusal is a verdict: its sentence is what the
tier says. Status 1 if a test has failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from kvoffload_patch.integration.install import release_in_use
from scripts import ROOT
from scripts.matrix import results

FILE = ROOT / "docs" / "measured" / "features.json"
PAGE = ROOT / "docs" / "features.md"
TIMEOUT_S = 3000
_ENGINE = "tests/engine/"
_HALF = "tests/integration/engine/"
_REFUSED = f"{_HALF}test_eligibility.py::test_what_the_tier_cannot_vouch_for_is_refused"


class Row(NamedTuple):
    """A shape or feature, and the tests that show it; without any it is not shown."""

    name: str
    what: str
    tests: tuple[str, ...] = ()


def _engine(name: str, what: str, *tests: str) -> Row:
    return Row(name, f"real engine: {what}", tuple(_ENGINE + test for test in tests))


def _refused(name: str, case: str) -> Row:
    return Row(name, "the check at start", (f"{_REFUSED}[{case}]",))


_TOKENS = "test_tokens.py::test_"
_PROCESSES = "test_processes.py::test_"
ROWS = (
    # Cache shapes
    _engine(
        "full attention",
        "Llama shape, evicted prefixes, copies as late as plans allow",
        f"{_TOKENS}answers_depend_on_the_first_block",
        f"{_TOKENS}an_evicted_prefix_returns",
        f"{_TOKENS}two_requests_for_the_same_evicted_prefix_load_it_once",
        f"{_TOKENS}a_prompt_of_whole_blocks_has_its_last_one_loaded_too",
    ),
    _engine("sliding window beside full attention", "Llama shape, two groups", "test_windows.py"),
    _engine(
        "states: gated delta net (Qwen3-Next)",
        "its architecture, bfloat16, prompts of many lengths, preemption",
        "test_states.py",
    ),
    _refused("states: Mamba 1 and 2, short convolutions, linear attention", "states of Mamba 2"),
    Row(
        "states: one, two and three groups",
        "vLLM's scheduler over a faked model, random runs",
        (f"{_HALF}test_random_runs.py::test_random_runs_of_layers_that_keep_a_state",),
    ),
    _refused("states on another device than the CPU", "states on a GPU"),
    _refused("states at every block (mode all)", "states at every block"),
    _refused("states with speculative decoding", "states of drafts"),
    _refused("states with checkpoints within a step", "states within a step"),
    _refused("states with --use-replayssm", "states outside of blocks"),
    _refused("states beside a KV connector", "states beside a connector"),
    _refused("hits of partial blocks", "partial hits"),
    _refused("encoder-decoder models", "encoder-decoder"),
    _refused("groups kept in host memory", "host memory"),
    _refused("groups with a prefix replay window", "replay"),
    Row("MLA", "vLLM's CPU build turns prefix caching off for it"),
    Row("chunked local attention", "passes the checks"),
    # Ways to run in parallel
    _engine("two tensor-parallel ranks", "two worker processes", f"{_PROCESSES}two_ranks"),
    _engine(
        "two data-parallel engines",
        "two engines, two API servers, one /metrics",
        "test_serving.py::test_figures_of_every_engine_are_on_metrics_and_agree",
    ),
    _refused("decode context parallelism (DCP)", "decode context parallel"),
    _refused("prefill context parallelism (PCP)", "prefill context parallel"),
    _refused("elastic expert parallelism", "elastic"),
    Row("expert parallelism with a fixed set of ranks", "passes the checks"),
    Row("the Ray executor", "0.32.0's CPU platform refuses it"),
    # The engine
    _engine(
        "engine core and worker in processes of their own",
        "",
        f"{_PROCESSES}the_start_up_file_reaches_engine_core_and_worker",
    ),
    _engine("asynchronous scheduling", "two steps in flight", f"{_PROCESSES}async_scheduling"),
    _engine("model runner V1", "", f"{_PROCESSES}both_model_runners[runner-v1]"),
    _engine("model runner V2", "", f"{_PROCESSES}both_model_runners[runner-v2]"),
    _engine(
        "preemption", "answers that outgrow the GPU", f"{_TOKENS}preempted_requests_answer_the_same"
    ),
    _engine("cache salts", "kept apart", f"{_TOKENS}cache_salts_are_kept_apart"),
    _engine("LoRA adapters", "kept apart", f"{_PROCESSES}adapters_are_kept_apart"),
    _engine(
        "reset of the prefix cache",
        "other weights",
        f"{_TOKENS}nothing_stale_is_served_after_a_reset",
    ),
    Row("speculative decoding", "passes the checks"),
    Row("multimodal prompts", "passes the checks"),
    # Neighbours
    _engine("KV cache events", "published over ZMQ, replayed, compared", "test_events.py"),
    Row(
        "KV cache events, every step",
        "vLLM's scheduler over a faked model, random runs",
        (f"{_HALF}test_random_runs.py::test_random_runs[0]", f"{_HALF}test_vllm_events.py"),
    ),
    _engine("a KV connector that fails", "loads recomputed or failed", "test_connectors.py"),
)


def run(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Run the tests of these rows; returns a result for each by its name."""
    asked = sorted({test for row in rows for test in row.tests})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *asked]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1"]
        if asked:
            subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, check=False)
        cases = _cases(report) if report.exists() else []
    about = {**results.provenance(), "release": str(Version(release_in_use()))}
    return {row.name: {**about, "tests": [c for c in cases if _is_of(c, row)]} for row in rows}


def _cases(report: Path) -> list[dict[str, str]]:
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        one = {"test": f"{case.get('file')}::{case.get('name')}", "outcome": "passed"}
        for kind in ("failure", "error", "skipped"):
            node = case.find(kind)
            if node is not None:
                one.update(outcome=kind, why=str(node.get("message")).splitlines()[0])
        for item in case.iter("property"):
            one[str(item.get("name"))] = str(item.get("value"))
        found.append(one)
    return found


def _is_of(case: dict[str, str], row: Row) -> bool:
    name = case["test"]
    return any(name == test or name.startswith((f"{test}[", f"{test}::")) for test in row.tests)


def verdict(row: Row, result: dict[str, Any] | None) -> str:
    """What a row's result comes to, in words; never empty."""
    if not row.tests:
        return "not shown: no test runs it"
    if result is None or not result["tests"]:
        return "not run yet"
    tests = result["tests"]
    outcomes = [test["outcome"] for test in tests]
    bad = next((test for test in tests if test["outcome"] in ("failure", "error")), None)
    if bad is not None:
        return f"**red**: {bad['why']}"
    if "passed" not in outcomes:
        return f"not run: {tests[0]['why'].removeprefix('Skipped: ')}"
    refusals = [test["refusal"] for test in tests if "refusal" in test]
    if refusals:
        return f"refused: {refusals[0]}"
    return f"green: {outcomes.count('passed')} passed"


def page(found: dict[str, dict[str, Any]]) -> str:
    """The text of docs/features.md."""
    lines = [
        "# Features",
        "",
        "Cache shapes, ways to run in parallel and neighbours: what was run of each, and what came",
        "out. `python scripts/matrix features` runs the tests and writes this page from",
        "[measured/features.json](measured/features.json); nothing here is written by hand. What",
        "is run on other releases and on a GPU is in [compatibility.md](compatibility.md).",
        "",
        "| Shape or feature | What was run | Release | Date | Verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in ROWS:
        result = found.get(row.name)
        told = bool(row.tests and result and result["tests"])
        release, date = (result["release"], result["date"]) if told and result else ("none", "none")
        what = row.what.removesuffix(": ")
        lines.append(f"| {row.name} | {what} | {release} | {date} | {verdict(row, result)} |")
    return "\n".join(lines) + "\n"


def load() -> dict[str, dict[str, Any]]:
    """The results there are, by the name of their row."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def main() -> int:
    """Run, and write results and page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--select", default="", help="rows whose name has this")
    parser.add_argument("--page", action="store_true", help="write the page only")
    parser.add_argument("--check", action="store_true", help="compare the page only")
    options = parser.parse_args()
    found = load()
    if options.check:
        return int(PAGE.read_text(encoding="utf-8") != page(found))
    if not options.page:
        found.update(run([row for row in ROWS if options.select in row.name and row.tests]))
        names = [row.name for row in ROWS if row.name in found]
        text = json.dumps({name: found[name] for name in names}, indent=1)
        FILE.write_text(f"{text}\n", encoding="utf-8")
    PAGE.write_text(page(found), encoding="utf-8")
    red = [row.name for row in ROWS if verdict(row, found.get(row.name)).startswith("**red")]
    print(f"{len(ROWS)} rows" + (f"; red: {red}" if red else ""))
    return int(bool(red))
