"""Files that engines have left are told from those whose ranks are about to end."""

from __future__ import annotations

from itertools import chain, count, repeat
from types import SimpleNamespace

import pytest
from engine import shared_memory

from scripts.soak import watch


@pytest.mark.parametrize(
    ("seen", "left"),
    [
        ([["old", "ending"], ["old"]], set()),
        ([["old", "ending"], ["old", "ending", "later"], ["old", "later"]], set()),
        ([["old", "left", "ending"], ["left"]], {"left"}),
    ],
)
def test_files_left(monkeypatch: pytest.MonkeyPatch, seen: list[list[str]], left: set[str]) -> None:
    files = chain(seen, repeat(seen[-1]))
    monkeypatch.setattr(watch, "files_left", lambda: next(files))
    clock = SimpleNamespace(monotonic=count().__next__, sleep=lambda seconds: None)
    monkeypatch.setattr(shared_memory, "time", clock)
    assert shared_memory.files_left(["old"]) == left
