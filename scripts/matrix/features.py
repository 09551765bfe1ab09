"""Runs the tests of each shape and feature on the installed vLLM, and writes docs/features.md.

    python scripts/matrix features                   # all rows, then the page
    python scripts/matrix features --select states   # only rows whose name has this; others stay
    python scripts/matrix features --release 0.30.0  # in an environment of that release (CPU)
    python scripts/matrix features --page            # the page only, from the results
    python scripts/matrix features --check           # status 1 if it is not what this would write

Results are in docs/measured/features.json, and those of other releases in docs/measured/features:
for each row the tests that were run, with their outcomes, the release, the date and the commit. A
refusal is a verdict: its sentence is what the tier says. Status 1 if a test has failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from kvoffload_patch.integration.install import release_in_use
from scripts import ROOT
from scripts.matrix import features_releases, results

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


def _states(name: str, kind: str, dtype: str) -> Row:
    what = f"its architecture, {dtype}, prompts of many lengths, preemption"
    return _engine(f"states: {name}", what, f"{_KEPT}[{kind}]")


_KEPT = "test_states.py::test_a_prefix_comes_back_with_its_state"
_STATES = (
    ("gated delta net (Qwen3-Next)", "gated delta net", "bfloat16"),
    ("short convolutions (LFM2)", "short convolutions", "float32"),
    (
        "Mamba 2 (Nemotron-H)",
        "Mamba 2",
        "float32 (two kernels that the CPU build lacks from 0.32 on are PyTorch's)",
    ),
    ("Mamba 1 (Jamba)", "Mamba 1", "float32"),
)
_RANDOM = f"{_HALF}test_random_runs.py::test_random_runs"
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
    *(_states(*one) for one in _STATES),
    Row("states: linear attention (MiniMax, Bailing, Kimi)", "its kernels are Triton's, for GPUs"),
    Row(
        "states: one, two and three groups",
        "vLLM's scheduler over a faked model, random runs",
        (f"{_RANDOM}_of_layers_that_keep_a_state[state]",),
    ),
    Row(
        "states with checkpoints within a step",
        "vLLM's scheduler over a faked model, random runs",
        (f"{_RANDOM}_of_layers_that_keep_a_state[state with checkpoints]",),
    ),
    _refused("states of a kind that was not shown to come back", "states of another kind"),
    _refused("states on another device than the CPU", "states on a GPU"),
    _refused("states at every block (mode all)", "states at every block"),
    _refused("states with speculative decoding", "states of drafts"),
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
        "two engines, two API servers, one /metrics; two engines behind one client",
        "test_serving.py::test_figures_of_every_engine_are_on_metrics_and_agree",
        "test_features.py::test_two_engines_of_one_client_load_from_a_tier_each",
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
        (f"{_RANDOM}[0]", f"{_HALF}test_vllm_events.py"),
    ),
    _refused("vLLM's own --kv-offloading-size", "another tier in CPU memory"),
    _refused("kvcached", "kvcached"),
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


def run(rows: list[Row], where: features_releases.Where) -> dict[str, dict[str, Any]]:
    """Run the tests of these rows; returns a result for each by its name."""
    asked = sorted({test for row in rows for test in row.tests})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [str(where.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *asked]
        # Known where tests of engines are asked for, and marked there.
        command += ["--features"] if any(test.startswith(_ENGINE) for test in asked) else []
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1"]
        if asked:
            subprocess.run(command, cwd=ROOT, env=where.env, timeout=TIMEOUT_S, check=False)
        cases = _cases(report) if report.exists() else []
    about = {**results.provenance(), "release": where.release}
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


def page(
    found: dict[str, dict[str, Any]], others: dict[str, dict[str, dict[str, Any]]] | None = None
) -> str:
    """The text of docs/features.md; ``others`` are results by release, then by row."""
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
    told_of = {
        release: {row.name: verdict(row, of.get(row.name)) for row in ROWS if row.tests}
        for release, of in (others or {}).items()
    }
    lines += features_releases.table(told_of, others or {})
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


def load(file: Path = FILE) -> dict[str, dict[str, Any]]:
    """The results there are, by the name of their row."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def results_of(release: str) -> dict[str, dict[str, Any]]:
    """The results on one release, by row: those of the installed one may be of several."""
    found = load(features_releases.files().get(release, FILE))
    return {name: result for name, result in found.items() if result["release"] == release}


def main() -> int:
    """Run, and write results and page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--select", default="", help="rows whose name has this; A|B: either")
    parser.add_argument("--page", action="store_true", help="write the page only")
    parser.add_argument("--check", action="store_true", help="compare the page only")
    features_releases.add_arguments(parser)
    options = parser.parse_args()
    if options.check:
        return int(PAGE.read_text(encoding="utf-8") != whole_page())
    red: list[str] = []
    if not options.page:
        parts = options.select.split("|")
        chosen = [row for row in ROWS if row.tests and any(part in row.name for part in parts)]
        with features_releases.where(options, str(Version(release_in_use()))) as where:
            red = _play(chosen, where)
    PAGE.write_text(whole_page(), encoding="utf-8")
    print(f"{len(ROWS)} rows" + (f"; red: {red}" if red else ""))
    return int(bool(red))


def _play(rows: list[Row], where: features_releases.Where) -> list[str]:
    """Run them and write their results; which rows of the file are red."""
    file = where.file or FILE
    found = {**load(file), **run(rows, where)}
    text = json.dumps({row.name: found[row.name] for row in ROWS if row.name in found}, indent=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n", encoding="utf-8")
    return [row.name for row in ROWS if verdict(row, found.get(row.name)).startswith("**red")]


def whole_page() -> str:
    """The page of all results there are."""
    files = features_releases.files()
    return page(load(), {release: load(file) for release, file in files.items()})
