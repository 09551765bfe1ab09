"""Memory that grows, in small steps, and threads that must not outlive a test."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from transfer.resident import kvoffload_threads

from kvoffload_patch.transfer.memory import mapping

MIB = 1 << 20


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "TOUCH_BYTES", MIB)
    monkeypatch.setattr(mapping, "CHECKED_BYTES", 2 * MIB)
    monkeypatch.setattr(mapping, "RESERVE_BYTES", MIB)


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert kvoffload_threads() == []
