"""`simulate tuned`: replays with other values of a number."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload_patch.tier import exclusive
from scripts.bench.varied import Varied
from scripts.simulate import tuned


@pytest.mark.parametrize("side", ["lru", tuned.HEADS])
def test_a_replay_has_the_other_value(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def replayed(job: Any) -> dict[str, Any]:
        seen.append(exclusive.AHEAD_TIMES)
        return {"trace": "chat", "seed": 0, "again": 1}

    monkeypatch.setattr(tuned.measure, "replayed", replayed)
    monkeypatch.setattr(tuned.heads, "replayed", replayed)
    for value in (3, 7):
        row = tuned.replayed(("AHEAD_TIMES", value, side, "chat", 0, 60.0))
        assert (row["value"], row["side"], row["again"]) == (value, side, 1)
    assert seen == [3, 7]


def test_figures_are_beside_those_of_the_first_value() -> None:
    shared = {"side": "lru", "trace": "chat", "loaded": 0, "first_token_mean": 0.5}
    rows = [
        {**shared, "value": value, "seed": seed, "again": again + 100 * seed, "stored": 10}
        for value, again in ((4, 100), (8, 110))
        for seed in (0, 1)
    ]
    lines = tuned.report(rows, Varied("NAME_TIMES", [4, 8])).splitlines()
    cells = {line.split("|")[1].strip(): line.split("|")[2:4] for line in lines}
    assert [one.strip() for one in cells["chat: recomputed"]] == ["300", "+6.7 % (+5.0 to +10.0)"]
    assert [one.strip() for one in cells["chat: loaded"]] == ["0", "0"], "nothing to compare with"
    for row in rows:
        del row["stored"]  # as rows of heads
    assert "chat: stored" in cells
    assert "chat: stored" not in tuned.report(rows, Varied("NAME_TIMES", [4, 8]))
