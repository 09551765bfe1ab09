"""What `matrix own` makes of the outcomes of vLLM's own tests; it runs for minutes itself."""

from __future__ import annotations

import copy
import io
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.matrix import own, own_plugin
from scripts.release import compatibility, sdist

(KNOWN,) = own.KNOWN
DIFFERS = f"{KNOWN}[False]"
PLAIN = {"a": "passed", "b": "failed", DIFFERS: "passed"}
TIER = {"hooks": 3, "tiers": 4, "stored": 5, "loaded": 6, "without": {}, "detached": []}
REPORTS: dict[str, dict[str, Any]] = {
    "plain": {"tests": PLAIN, "hooks": 0},
    "armed": {"tests": PLAIN, "hooks": 3},
    "tier": {"tests": {**PLAIN, DIFFERS: "failed"}, **TIER},
    "bounded": {"tests": {DIFFERS: "passed"}},
}


def test_known_differences_alone_are_green_and_are_told_of_with_their_reason() -> None:
    found = own.compared(REPORTS)
    assert (found["verdict"], found["faults"]) == ("green", [])
    assert found["differ"] == {"armed": [], "tier": [DIFFERS]}
    assert found["outcomes"]["plain"] == {"failed": 1, "passed": 2}
    result = {"kind": "own-tests", "release": "0.32.0", "date": "2026-11-23", **found}
    text = compatibility.page([result])
    assert "- 0.32.0, green, 2026-11-23: 3 tests, 2 of which pass on plain vLLM; 0 come" in text
    assert f"`{KNOWN.rpartition('::')[2]}`: {own.KNOWN[KNOWN]}." in text
    result["faults"] = ["a: passed, armed failed"]
    assert "- 0.32.0, red" in compatibility.page([result])


@pytest.mark.parametrize(
    ("way", "change", "fault"),
    [
        ("armed", {"tests": {**PLAIN, "b": "passed"}}, "b: failed, armed passed"),
        ("armed", {"tests": {"a": "passed", "b": "failed"}}, f"{DIFFERS}: passed, armed absent"),
        ("armed", {"hooks": 0}, "expected hooks in the armed run and none in the plain one"),
        ("plain", {"hooks": 3}, "expected hooks in the armed run and none in the plain one"),
        ("tier", {"tests": {**PLAIN, "a": "failed"}}, "a: passed, with a tier failed"),
        ("tier", {"detached": ["b"]}, "b: its tier was detached"),
        ("tier", {"loaded": 0}, "no tier loaded a block"),
        ("tier", {"tiers": 0}, "no tier was attached"),
        ("tier", {"why": "it hung", "tests": PLAIN}, "tier: it hung"),
        ("bounded", {"tests": {DIFFERS: "failed"}}, f"{DIFFERS}: failed, with a bounded connector"),
        ("bounded", {"tests": {}}, "nothing passed"),
    ],
)
def test_anything_else_is_red(way: str, change: dict[str, Any], fault: str) -> None:
    reports = copy.deepcopy(REPORTS)
    reports[way] |= change
    found = own.compared(reports)
    assert found["verdict"] == "red" and fault in found["faults"]


def test_a_test_that_only_begins_like_a_known_one_is_not_known() -> None:
    reports = copy.deepcopy(REPORTS)
    for way in ("plain", "armed", "tier"):
        reports[way]["tests"] |= {f"{KNOWN}_too": "failed" if way == "tier" else "passed"}
    assert own.compared(reports)["faults"] == [f"{KNOWN}_too: passed, with a tier failed"]


def test_of_a_tests_parts_the_worst_counts(tmp_path: Path) -> None:
    report = own_plugin.Report(tmp_path / "report.json")

    def said(nodeid: str, *outcomes: str) -> str:
        for outcome in outcomes:
            report.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, outcome=outcome))
        return report.tests[nodeid]

    assert said("a", "passed", "passed", "passed") == "passed"
    assert said("b", "passed", "failed", "passed") == "failed"
    assert said("c", "skipped", "passed") == "skipped"
    assert said("d", "passed", "passed", "failed") == "failed"
    report.pytest_collectreport(SimpleNamespace(nodeid="e", outcome="failed"))
    report.pytest_collectreport(SimpleNamespace(nodeid="f", outcome="passed"))
    assert report.tests["e"] == "failed" and "f" not in report.tests


def test_of_a_source_distribution_the_tests_are_kept(tmp_path: Path) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name in ("tests/v1/test_a.py", "pyproject.toml", "vllm/a.py", "rust/tests/b.py"):
            member = tarfile.TarInfo(f"vllm-9.9/{name}")
            member.size = 2
            archive.addfile(member, io.BytesIO(b"a\n"))
    sdist.unpack(made.getvalue(), tmp_path / "new")
    found = {str(p.relative_to(tmp_path / "new")) for p in (tmp_path / "new").rglob("*.*")}
    assert found == {"tests/v1/test_a.py", "pyproject.toml"}
