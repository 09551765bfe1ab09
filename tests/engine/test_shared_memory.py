"""Files of engines that have ended are told from those of engines that start meanwhile."""

from __future__ import annotations

from itertools import chain, repeat

import pytest
from engine import shared_memory


@pytest.mark.parametrize(
    ("seen", "left"),
    [
        ([["old", "starting"], ["old"]], set()),
        ([["old", "starting"], ["old", "starting", "later"], ["old", "later"]], set()),
        ([["old", "left", "starting"], ["left"]], {"left"}),
    ],
)
def test_files_left(monkeypatch: pytest.MonkeyPatch, seen: list[list[str]], left: set[str]) -> None:
    files = chain(seen, repeat(seen[-1]))
    monkeypatch.setattr(shared_memory, "shared_files", lambda: next(files))
    monkeypatch.setattr(shared_memory, "LIMIT_S", 0.3)
    assert shared_memory.files_left(["old"]) == left
