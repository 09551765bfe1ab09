"""What was played in this session, counted for `scripts/matrix engines`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine import engines, release

_counts = {"tokens_compared": 0, "tokens_equal": 0, "tokens_loaded": 0, "engines": 0}
_runners: set[str] = set()
_schedulers: set[str] = set()


def add_run(run: engines.Run, tiered: bool) -> None:
    """Note what an engine said of itself."""
    _counts["engines"] += 1
    played = run.results.get("setup", {})
    if tiered and played:
        _runners.add(played["runner"])
        _schedulers.add(played["scheduler"])
    if tiered:
        _counts["tokens_loaded"] += run.results.get("conversations", {}).get("cached", 0)


def assert_same(on: dict[str, Any], off: dict[str, Any], answers: str = "tokens") -> None:
    """The answers with the tier are those without it; every token is counted."""
    pairs = list(zip(on[answers], off[answers]))
    _counts["tokens_compared"] += sum(max(len(a), len(b)) for a, b in pairs)
    _counts["tokens_equal"] += sum(x == y for a, b in pairs for x, y in zip(a, b))
    assert on[answers] == off[answers]


class Reporter:
    """A pytest plugin that writes the counts, and how each test went, to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One test's set-up, call or tear-down; a fixture's engine counts for its first test."""
        name = report.nodeid.partition("engine/")[2]
        test = self._tests.setdefault(name, {"name": name, "outcome": "passed", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 1)
        if report.outcome != "passed":
            test["outcome"] = report.outcome
            test["why"] = _reason(report)

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        found = {
            **release.facts(),
            "block_size": release.block_size(),
            "runners": sorted(_runners),
            "schedulers": sorted(_schedulers),
            **_counts,
            "tests": list(self._tests.values()),
        }
        self._file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _reason(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).partition("Skipped: ")[2]
    return str(report.longrepr)[-12000:]
