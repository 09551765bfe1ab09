"""The table of supported releases in README.md, out of the files kept of them."""

from __future__ import annotations

from typing import Any

from kvoffload_patch.integration.patch_table.verified import DATA
from kvoffload_patch.patching import Records
from scripts import ROOT
from scripts.release.compatibility import load
from scripts.release.known import default_release

PAGE = ROOT / "README.md"
HEAD = "| vLLM | Shown by |\n| --- | --- |\n"
CPU = (
    "the same tests of evicted prefixes, late copies, abort, reset, two ranks and (from 0.11.2 on) "
    "asynchronous scheduling, on real engines on the CPU, model runner V1 and (from 0.23.0 on) V2"
)
GPU = "on one GPU, with CUDA graphs and"
SCHEDULER = (
    "its own scheduler with a faked model, and its functions and attributes against the patch table"
)
REFUSED = "| all others, development builds and pre-releases included | refused |\n"


def table() -> str:
    """The whole table."""
    results = load()
    cpu, gpu = _run(results, "cpu-engine"), _run(results, "gpu-engine")
    known = Records.load(DATA).releases
    installed = default_release()
    builds = [release for release, result in cpu.items() if "kernels" not in result]
    others = [release for release in builds if release != installed]
    first = f"{', '.join(others[:3])} and so on to {others[-1]}, the last patch of each"
    rows = [
        (installed, "the tests, real engines included"),
        (first, CPU),
        (", ".join(gpu), f"{_runners(gpu)} {GPU} {_without_graphs(gpu)}{_more(gpu)}"),
        (f"every release from {known[0]} to {known[-1]}", SCHEDULER),
    ]
    return HEAD + "".join(f"| {which} | {how} |\n" for which, how in rows) + REFUSED


def _run(results: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    found = {result["release"]: result for result in results if result["kind"] == kind}
    return dict(sorted(found.items(), key=lambda item: [int(n) for n in item[0].split(".")]))


_MORE = (
    ("two ranks", "on two GPUs"),
    ("four ranks", "on four"),
    ("windows", "with sliding windows"),
    ("mla", "with MLA"),
    ("eagle3", "with drafts"),
)


def _runners(gpu: dict[str, dict[str, Any]]) -> str:
    """Both, and where it was one of them."""
    alone = []
    for name, one in gpu.items():
        played = {t["name"][:2] for t in one["tests"] if t["outcome"] == "passed"}
        alone += [f"{runner.upper()} alone on {name}" for runner in played if len(played) == 1]
    return "both model runners" + (f" ({', '.join(alone)})" if alone else "")


def _without_graphs(gpu: dict[str, dict[str, Any]]) -> str:
    """On which of the releases it was run without them."""
    but = [name for name, one in gpu.items() if not _has_passed(one, "no graphs")]
    return f"(not on {', '.join(but)}) without" if but else "without"


def _has_passed(result: dict[str, Any], kind: str) -> bool:
    return any(t["name"].endswith(kind) and t["outcome"] == "passed" for t in result["tests"])


def _more(gpu: dict[str, dict[str, Any]]) -> str:
    """What some of the releases were run with besides."""
    also: dict[str, list[str]] = {}
    for kind, words in _MORE:
        some = [name for name, one in gpu.items() if _has_passed(one, kind)]
        if some:
            also.setdefault(", ".join(some), []).append(words)
    return "".join(f"; {names} also {', '.join(words)}" for names, words in also.items())


def page() -> str:
    """README.md with the table as it is to be."""
    text = PAGE.read_text(encoding="utf-8")
    begin = text.index(HEAD)
    return text[:begin] + table() + text[text.index(REFUSED, begin) + len(REFUSED) :]
