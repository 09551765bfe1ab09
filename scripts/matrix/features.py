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


_MOVED = "bytes moved for a hit"
_CONNECTORS = "test_connectors.py::test_"
_DRAFTS = "test_features.py::test_drafts_are_accepted_and_what_comes_back_has_their_kv"
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
    _engine(
        "chunked local attention",
        "Llama 4 shape, experts, two groups",
        "test_features.py::test_chunks_of_attention_come_back",
    ),
    Row(
        _MOVED,
        "vLLM's scheduler over a faked model, every token compared; the table below",
        (f"{_HALF}test_moved.py",),
    ),
    # Ways to run in parallel
    _engine("two tensor-parallel ranks", "two worker processes", f"{_PROCESSES}two_ranks"),
    _engine(
        "two tensor-parallel ranks with the same bytes (fewer KV heads than ranks)",
        "Llama shape with one KV head, two worker processes, one copy",
        "test_same_bytes.py",
    ),
    _engine(
        "two data-parallel engines",
        "two engines, two API servers, one /metrics",
        "test_serving.py::test_figures_of_every_engine_are_on_metrics_and_agree",
    ),
    _refused("decode context parallelism (DCP)", "decode context parallel"),
    _refused("prefill context parallelism (PCP)", "prefill context parallel"),
    _refused("elastic expert parallelism", "elastic"),
    _engine(
        "experts, tensor parallel",
        "Mixtral shape, two worker processes",
        "test_features.py::test_experts_on_two_ranks[tensors]",
    ),
    _engine(
        "expert parallelism with a fixed set of ranks",
        "Mixtral shape, two worker processes",
        "test_features.py::test_experts_on_two_ranks[experts]",
    ),
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
    _engine("speculative decoding: n-grams", "drafts accepted and refused", f"{_DRAFTS}[ngram]"),
    _engine(
        "speculative decoding: a draft model",
        "the target itself, every draft accepted",
        f"{_DRAFTS}[draft_model]",
    ),
    _engine("speculative decoding: EAGLE-3", "drafts accepted and refused", f"{_DRAFTS}[eagle3]"),
    _engine(
        "speculative decoding: MTP", "MiMo shape, drafts accepted and refused", f"{_DRAFTS}[mtp]"
    ),
    _engine(
        "multimodal prompts",
        "LLaVA shape, images with the same placeholders and cache salts kept apart",
        "test_features.py::test_two_images_with_the_same_placeholders_are_kept_apart",
    ),
    # Neighbours
    _engine("KV cache events", "published over ZMQ, replayed, compared", "test_events.py"),
    Row(
        "KV cache events, every step",
        "vLLM's scheduler over a faked model, random runs",
        (f"{_HALF}test_random_runs.py::test_random_runs[0]", f"{_HALF}test_vllm_events.py"),
    ),
    _refused("vLLM's own --kv-offloading-size", "another tier in CPU memory"),
    _engine(
        "a KV connector that fails",
        "loads recomputed or failed",
        f"{_CONNECTORS}what_a_failed_load_left_is_not_stored",
    ),
    _engine(
        "a KV connector that fills blocks from the host",
        "before the forward pass, not in the order of the stream",
        f"{_CONNECTORS}what_a_connector_fills_from_the_host_does_not_overtake_a_store",
    ),
    _engine(
        "hits of the tier on /metrics beside a KV connector",
        "a server over HTTP",
        "test_serving.py::test_hits_are_on_metrics_beside_a_connector",
    ),
)


def run(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Run the tests of these rows; returns a result for each by its name."""
    asked = sorted({test for row in rows for test in row.tests})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *asked]
        # Known where tests of engines are asked for, and marked there.
        command += ["--features"] if any(test.startswith(_ENGINE) for test in asked) else []
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
    return "\n".join(lines + _moved(found.get(_MOVED))) + "\n"


def _moved(result: dict[str, Any] | None) -> list[str]:
    """A table of what hits move, by kinds of layers, beside full attention alone."""
    tests = result["tests"] if result else []
    rows = [json.loads(test["moved"]) for test in tests if "moved" in test]
    whole = {row["tokens"]: row["loaded"] for row in rows if row["shape"] == "full attention"}
    lines = [
        "",
        "## Bytes moved for a hit",
        "",
        "Models of two layers: full attention alone, and beside a layer that sees 128 tokens, or",
        "its chunk of 128. A page is what a layer keeps for the 16 tokens of a block. A prompt may",
        "end anywhere, so all pages are stored; a hit loads those that it needs.",
        "",
        "| Tokens hit | Beside full attention | Pages stored | Pages loaded | Share |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: row["tokens"]):
        part = row["loaded"] / whole[row["tokens"]]
        beside = row["shape"].replace("full attention", "nothing")
        cells = f"{row['tokens']:,}", beside, row["stored"], row["loaded"], f"{part:.0%}"
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines if rows else []


def load() -> dict[str, dict[str, Any]]:
    """The results there are, by the name of their row."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def main() -> int:
    """Run, and write results and page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--select", default="", help="rows whose name has this; A|B: either")
    parser.add_argument("--page", action="store_true", help="write the page only")
    parser.add_argument("--check", action="store_true", help="compare the page only")
    options = parser.parse_args()
    found = load()
    if options.check:
        return int(PAGE.read_text(encoding="utf-8") != page(found))
    if not options.page:
        parts = options.select.split("|")
        chosen = [row for row in ROWS if any(part in row.name for part in parts)]
        found.update(run([row for row in chosen if row.tests]))
        names = [row.name for row in ROWS if row.name in found]
        text = json.dumps({name: found[name] for name in names}, indent=1)
        FILE.write_text(f"{text}\n", encoding="utf-8")
    PAGE.write_text(page(found), encoding="utf-8")
    red = [row.name for row in ROWS if verdict(row, found.get(row.name)).startswith("**red")]
    print(f"{len(ROWS)} rows" + (f"; red: {red}" if red else ""))
    return int(bool(red))
