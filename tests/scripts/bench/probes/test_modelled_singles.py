"""`bench modelled_singles`: who asks, what is counted, and what is told of it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from scripts.bench.chats.load import Load
from scripts.bench.probes import modelled_engine
from scripts.bench.probes import modelled_singles as singles
from scripts.bench.probes.modelled import play

FEW = Load(
    singles=2, singles_rounds=2, at_once=3, pause_s=0.2, whole_tokens=512, ragged_tokens=500,
    stored_tokens=480, extend_tokens=32,
)  # fmt: skip


@pytest.mark.parametrize(("gpu_blocks", "loaded"), [(1000, False), (200, True)])
def test_what_has_left_the_gpu_is_loaded(
    gpu_blocks: int, loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight prompts of 31 or 32 blocks, two of which end on a block, which is loaded anyway."""
    monkeypatch.setattr(modelled_engine, "GPU_BLOCKS", gpu_blocks)
    engine = modelled_engine.TierEngine(1.0, by_layer=True, follows=True)
    clients = singles.Singles(engine, FEW)
    play(engine, clients)
    assert clients.asked == 2 * (2 * 32 + 2 * 31 + 4 * 32)
    assert clients.loaded == 4 or loaded
    assert (4 < clients.loaded <= clients.asked) == loaded
    assert engine.clock.ms > 15 * 200


def test_each_run_has_prompts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def played(engine: Any, clients: Any) -> None:
        seen.append([one.prompt for one in clients._stored])
        clients.asked = 4

    monkeypatch.setattr(singles, "play", played)
    assert list(singles.shares(2)) == [0, 0]
    assert seen[0] != seen[1]


def test_a_line_has_the_middle_and_the_ends_of_a_value() -> None:
    rows = [
        {"side": side, "loaded": loaded}
        for side, found in (("A 1", (0.25, 0.5, 0.75)), ("A 2", (0.1,)))
        for loaded in found
    ]
    lines = [line.replace(" ", "") for line in singles.report(rows).splitlines()]
    assert "|A1|50|25|75|3|1|" in lines and "|A2|10|10|10|1|0|" in lines
