"""Ending an engine core's process: its clients are told first, whatever comes of that."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine.core import EngineCoreProc

from kvoffload_patch.integration.engine.ranks import ending


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is done, in its order; the process does not end."""
    seen: list[Any] = []
    monkeypatch.setattr(ending, "end_process", lambda: seen.append("end"))
    monkeypatch.setattr(ending.time, "sleep", lambda seconds: seen.append(seconds))
    return seen


def test_clients_are_told_by_vllms_own_word_and_then_the_process_ends(events: list[Any]) -> None:
    """One without a server hears of a process that is gone from nobody else."""
    core = SimpleNamespace(output_queue=queue.Queue())
    end = ending.ending(core)
    assert end is not None
    end()
    assert core.output_queue.get_nowait() == EngineCoreProc.ENGINE_CORE_DEAD
    assert events == [ending.SENDING_S, "end"]


def test_the_process_ends_also_where_they_cannot_be_told(events: list[Any]) -> None:
    end = ending.ending(SimpleNamespace(output_queue=object()))
    assert end is not None
    with pytest.raises(AttributeError):
        end()
    assert events == ["end"]


def test_an_engine_core_in_the_process_of_its_front_end_is_not_to_be_ended() -> None:
    assert ending.ending(SimpleNamespace()) is None
