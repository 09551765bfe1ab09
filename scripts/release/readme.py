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
    "the same tests of evicted prefixes, late copies, abort, reset and two ranks on real engines "
    "on the CPU; [docs/compatibility.md](docs/compatibility.md) has every run"
)
GPU = (
    "real engines on one GPU or several; [docs/features.md](docs/features.md#on-a-gpu) has the "
    "model runners, shapes and ranks of each"
)
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
        (", ".join(gpu), GPU),
        (f"every release from {known[0]} to {known[-1]}", SCHEDULER),
    ]
    return HEAD + "".join(f"| {which} | {how} |\n" for which, how in rows) + REFUSED


def _run(results: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    found = {result["release"]: result for result in results if result["kind"] == kind}
    return dict(sorted(found.items(), key=lambda item: [int(n) for n in item[0].split(".")]))


def page() -> str:
    """README.md with the table as it is to be."""
    text = PAGE.read_text(encoding="utf-8")
    begin = text.index(HEAD)
    return text[:begin] + table() + text[text.index(REFUSED, begin) + len(REFUSED) :]
