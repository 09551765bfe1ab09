"""The log line on what the tier did."""

from __future__ import annotations

import pytest

from kvoffload_patch.integration.engine.reports.stats import Report
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies.lru import LRUPolicy


def test_a_line_says_what_happened_since_the_one_before(caplog: pytest.LogCaptureFixture) -> None:
    manager = OffloadManager(8, LRUPolicy)
    report = Report(manager, interval=1e9)
    manager.stats.stored, manager.stats.loaded = 5, 3
    report.count_hit(100, 48, 0)
    report.tick()
    assert not caplog.messages, "it is not time yet"
    report.flush()
    report.flush()
    (line,) = caplog.messages
    assert "48 of 100 tokens hit (48.0%), blocks loaded: 3, stored: 5, evicted: 0" in line
    assert "failed" not in line


def test_what_was_computed_though_the_tier_has_it_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    report = Report(OffloadManager(8, LRUPolicy), interval=1e9)
    report.count_hit(100, 0, 96)
    report.flush()
    report.count_hit(100, 96, 0)
    report.flush()
    first, second = caplog.messages
    said = "0 of 100 tokens hit (0.0%), 96 in the tier but computed, as loads are slow, blocks"
    assert said in first
    assert "slow" not in second


def test_copies_that_failed_are_said(caplog: pytest.LogCaptureFixture) -> None:
    manager = OffloadManager(8, LRUPolicy)
    report = Report(manager, interval=0)
    manager.stats.failed = 2
    report.tick()
    manager.stats.failed, manager.stats.dropped = 5, 1
    report.tick()
    manager.stats.dropped = 2
    report.tick()
    first, second, third = caplog.messages
    assert ", failed: 2, tier usage: 0.0%" in first
    assert "not stored for want of room: 1, failed: 3, tier usage" in second
    assert "failed" not in third


def test_another_interval_is_no_step() -> None:
    report = Report(OffloadManager(8, LRUPolicy), interval=10)
    report.tick()
    before = report.last_step
    report.use(5)
    assert report.last_step == before
