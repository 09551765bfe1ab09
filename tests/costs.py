"""What tests cost: seconds of CPU time of each, with all processes that it has started.

Wall time depends on what else the machine does, and on the other worker of `scripts/test`; CPU time
hardly does. A fixture's cost, such as that of an engine, is its first test's.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

SHOWN = 15
_TICKS = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat after the name, which ends with a parenthesis.
_PARENT, _TIMES = 1, slice(11, 15)  # user and system time, own and of children waited for


class Costs:
    """A pytest plugin that adds up what files and tests cost, and prints the dearest."""

    def __init__(self) -> None:
        self._spent = cpu_seconds()
        self._tests: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note what set-up, call or tear-down has cost; xdist sends it with the report."""
        report = yield
        before, self._spent = self._spent, cpu_seconds()
        report.user_properties.append(("cpu_s", round(self._spent - before, 2)))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add it up."""
        for name, value in report.user_properties:
            if name == "cpu_s":
                self._tests[report.nodeid] += value

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the dearest files and tests."""
        files: Counter[str] = Counter()
        for test, seconds in self._tests.items():
            files[test.partition("::")[0]] += seconds
        terminalreporter.section(f"CPU time, {sum(files.values()):.0f} s in all")
        for costs in (files, self._tests):
            for name, seconds in costs.most_common(SHOWN):
                terminalreporter.write_line(f"{seconds:8.1f} s  {name}")
            terminalreporter.write_line("")


def cpu_seconds() -> float:
    """CPU time so far of this process and of all that descend from it, ended or not."""
    stats = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stats[folder.name] = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
    children: dict[str, list[str]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat[_PARENT], []).append(pid)
    ticks, todo = 0, [str(os.getpid())]
    while todo:
        pid = todo.pop()
        todo += children.get(pid, [])
        ticks += sum(int(field) for field in stats[pid][_TIMES]) if pid in stats else 0
    return ticks / _TICKS
