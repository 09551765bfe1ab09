"""What the tier's calls take is counted by step and by thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import Mini
from integration.engine.world import prompt

from kvoffload_patch.integration.engine.tier import SchedulerTier
from kvoffload_patch.integration.worker.tier import RankTier
from kvoffload_patch.transfer.queue import CopyQueue
from scripts.bench.probes.tier_calls import RANK_CALLS, SCHEDULER_CALLS, TierCalls


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> TierCalls:
    """Put back what it replaces."""
    for owner, names in ((SchedulerTier, SCHEDULER_CALLS), (RankTier, RANK_CALLS)):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(CopyQueue, "advance", lambda queue: True)
    return TierCalls()


def test_calls_are_timed_from_when_they_are_begun_again(calls: TierCalls) -> None:
    mini = Mini()
    mini.add(prompt(1), count=3)
    mini.run()
    assert calls.steps == 3
    engine, enqueuing, thread = calls.us_a_step()
    assert engine > 0
    assert enqueuing == thread == 0
    calls.begin()
    assert calls.us_a_step() == (0, 0, 0)


def test_copies_enqueued_by_another_thread_are_counted_apart(calls: TierCalls) -> None:
    queue: Any = CopyQueue.__new__(CopyQueue)
    queue.advance()
    assert calls.enqueuing_s > 0 == calls.thread_s
    thread = threading.Thread(target=queue.advance)
    thread.start()
    thread.join()
    assert calls.thread_s > 0
