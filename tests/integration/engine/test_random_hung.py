"""Ranks that die, hang or do not answer, always the same ones; `random_hung.py` plays others."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from integration.engine.random_hung import describe, run
from integration.engine.seeds import played

SEEDS = (1, 2, 5, 7, 11, 12, 15, 16, 17, 21, 22, 23, 25, 30)


def test_what_stops_is_noticed_in_the_time_that_is_stated() -> None:
    seen = played(run, SEEDS, describe)
    for name in ("device", "dead", "mute", "refused", "went on", "ended", "ended by Died"):
        assert seen[name], f"in no run: {name}"
