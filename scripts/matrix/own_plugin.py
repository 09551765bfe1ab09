"""The plugin that `own` loads into the pytest of vLLM's own tests.

Writes each test's outcome to the file $OWN_REPORT. With $OWN_TIER every scheduler that a test makes
and that can have a tier has one, whose ranks are done with every copy at once. With
$OWN_TIER=bounded vLLM's mock connector promises no tokens behind a request's end, and leaves the
last one to be computed where it loads within the step, as vLLM's own connectors do.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvoffload_patch.config import Settings
from kvoffload_patch.integration.engine.attach import connect
from kvoffload_patch.integration.engine.eligibility import check_eligible
from kvoffload_patch.integration.errors import TierNotNeeded, TierRefused
from kvoffload_patch.integration.install import installed, step_hooks
from kvoffload_patch.integration.protocol import RESULT
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies import POLICIES

SLOTS = 4096


class Ranks:
    """Stands for the workers: every copy is made when it is planned, within the step."""

    load_ms_per_block = 0.001
    copies_overlap = compares = False
    sharing = 1
    overlap = 0.0

    def drain(self) -> None:
        """Nothing is under way."""

    def finish(self, plan: Any) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """There is no memory to give back."""

    def step_failure(self) -> str:
        """No copy is made."""
        return ""


class Report:
    """Outcomes of tests, and what the tiers did."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.tests: dict[str, str] = {}
        self.tiers: list[tuple[OffloadManager, Any, str]] = []
        self.without = Counter[str]()
        self.running = ""

    @pytest.hookimpl
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Schedulers made from now on are this test's."""
        self.running = nodeid

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The worst of setting up, running and ending a test."""
        before = self.tests.get(report.nodeid, "passed")
        if before == "passed":
            self.tests[report.nodeid] = report.outcome

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be read counts as one test."""
        if report.outcome != "passed":
            self.tests[report.nodeid] = report.outcome

    @pytest.hookimpl
    def pytest_sessionfinish(self) -> None:
        """Write everything."""
        stats = [manager.stats for manager, _, _ in self.tiers]
        self._file.write_text(
            json.dumps(
                {
                    "tests": self.tests,
                    "hooks": len(installed()),
                    "tiers": len(self.tiers),
                    "without": dict(self.without),
                    "stored": sum(one.stored for one in stats),
                    "loaded": sum(one.loaded for one in stats),
                    "detached": sorted({test for _, b, test in self.tiers if b.detached}),
                }
            )
        )

    def attach(self, scheduler: Any) -> None:
        """Give a scheduler a tier, unless it is one that can have none."""
        try:
            check_eligible(scheduler.vllm_config, scheduler)
        except (TierNotNeeded, TierRefused) as reason:
            self.without[str(reason)] += 1
            return
        settings = Settings()
        manager = OffloadManager(SLOTS, POLICIES[settings.eviction])
        breaker = connect(scheduler, step_hooks(scheduler), manager, Ranks(), settings)  # type: ignore[arg-type]
        self.tiers.append((manager, breaker, self.running))
        update = scheduler.update_from_output

        def with_result(scheduler_output: Any, model_runner_output: Any, *more: Any) -> Any:
            setattr(model_runner_output, RESULT, manager.drained())
            return update(scheduler_output, model_runner_output, *more)

        scheduler.update_from_output = with_result


def pytest_configure(config: pytest.Config) -> None:
    """Report, and attach if asked to."""
    report = Report(Path(os.environ["OWN_REPORT"]))
    config.pluginmanager.register(report)
    if not os.environ.get("OWN_TIER"):
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    as_made = Scheduler.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        as_made(self, *args, **kwargs)
        report.attach(self)

    Scheduler.__init__ = make


def pytest_collection_finish() -> None:
    """Everything is imported by then, the connector too."""
    # vLLM's conftest collects garbage after each test, and looked at all that is imported.
    gc.unfreeze = lambda: None
    gc.freeze()
    if os.environ.get("OWN_TIER") != "bounded":
        return
    # Of vLLM's tests, which have imported it.
    MockKVConnector = sys.modules["tests.v1.kv_connector.unit.utils"].MockKVConnector
    as_made = MockKVConnector.get_num_new_matched_tokens

    def bounded(self: Any, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, beside = as_made(self, request, num_computed_tokens)
        within = request.num_tokens - (0 if beside else 1)
        most = max(0, within - num_computed_tokens)
        return tokens if tokens is None else min(tokens, most), beside

    MockKVConnector.get_num_new_matched_tokens = bounded
