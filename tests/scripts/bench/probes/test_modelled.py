"""`bench modelled`: the model's bus and steps, and what following the time of loads does there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvoffload_patch.integration.engine.requests import admission
from scripts.bench.probes import modelled
from scripts.bench.probes.modelled_engine import (
    BLOCK_BYTES,
    LOAD_MS,
    Bus,
    Clock,
    Engine,
    TierEngine,
)


def test_loads_cross_one_after_the_other_and_are_timed_on_the_way() -> None:
    clock = Clock()
    bus = Bus(clock, 0.5)
    bus.carry(400, at=10.0)
    bus.carry(100, at=20.0)
    assert (bus.times(1), bus.times(2)) == ((10, 210), (210, 260))
    clock.ms = 210
    assert bus.done() == 1 and bus.next_end(after=210) == 260
    assert bus.measured.ms_per_byte() * BLOCK_BYTES == pytest.approx(0.5)
    clock.ms = 260
    assert bus.done() == 2 and bus.next_end(after=260) == 260


@pytest.mark.parametrize(("by_layer", "part"), [(True, 1 / 4), (False, 1)])
def test_a_step_waits_for_what_it_reads(by_layer: bool, part: float) -> None:
    """By layer only the last quarter of its layers is behind the end of a long load."""
    engine = TierEngine(1.0, by_layer, follows=True)
    engine.loads._ms_per_block = 0.05
    load = SimpleNamespace(target_ids=range(1000), ticket=1)
    plan = SimpleNamespace(before=(load,), after=(), waits_for=lambda link: 1)
    tokens = {"a": 20, "b": 1}
    step = SimpleNamespace(
        kvoffload_plan=plan, num_scheduled_tokens=tokens, total_num_scheduled_tokens=21
    )
    costs = engine.costs
    takes = costs.step + 2 * costs.request + costs.prompt + 19 * costs.token
    assert engine.play(step) == pytest.approx(50 + part * takes)
    assert engine.waited_ms == pytest.approx(50 + part * takes - takes - costs.begin)


@pytest.fixture(scope="module")
def few() -> Any:
    """Few chats, in a cache that holds fewer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modelled, "CHATS", 8)
        patch.setattr(modelled, "AT_ONCE", 4)
        patch.setattr(modelled, "TURNS", 3)
        patch.setattr("scripts.bench.probes.modelled_engine.GPU_BLOCKS", 1800)
        yield


def played(engine: Engine) -> dict[str, float]:
    return modelled.played(engine, seed=0)


@pytest.mark.usefixtures("few")
def test_steps_do_not_wait_for_a_slow_bus_once_its_speed_is_known() -> None:
    floor = played(Engine())
    start, followed = (played(TierEngine(4.0, True, follows)) for follows in (False, True))
    assert floor["waited"] == pytest.approx(0, abs=1e-6)
    assert followed["waited"] < start["waited"] / 2, "it takes the first loads to know"
    assert followed["token_p50"] < start["token_p50"]


@pytest.mark.usefixtures("few")
def test_at_the_speed_of_the_start_both_do_the_same() -> None:
    start, followed = (played(TierEngine(1.0, True, follows)) for follows in (False, True))
    assert start == pytest.approx(followed)


def test_a_table_for_each_speed_has_the_floor_first() -> None:
    row = {name: 2.0 for name in modelled.ROWS}
    sides = [("floor", 1.0), *((side, 3.0) for side in modelled.SIDES)]
    rows = [{"side": side, "slower": slower, "seed": 0, **row} for side, slower in sides]
    lines = modelled.report(rows).splitlines()
    assert lines[0].split("|")[1:4] == [
        " loads take 3 times what they took at the start ", " floor ", " start "
    ]  # fmt: skip
    assert len(lines) == 2 + len(modelled.ROWS)


@pytest.mark.parametrize(
    ("option", "field", "values"),
    [
        (["--stall", "7,8"], "max_stall_ms", [7, 8]),
        (["--heads"], "gpu_prefixes", ["whole", "auto"]),
    ],
)
def test_what_is_asked_for_is_a_setting_of_the_tier(
    option: list[str], field: str, values: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Engine] = []

    def played(engine: Engine, seed: int) -> dict[str, float]:
        made.append(engine)
        return dict.fromkeys(modelled.ROWS, 2.0)

    monkeypatch.setattr(modelled, "played", played)
    monkeypatch.setattr(modelled, "SLOWER", (1.0,))
    monkeypatch.setattr("sys.argv", ["modelled", "--seeds", "1", *option])
    assert modelled.main() == 0
    _, *tiers = made
    assert [getattr(one.sim.breaker.tier.settings, field) for one in tiers] == values


def test_numbers_and_speeds_are_those_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[float, float]] = []

    def played(engine: Engine, seed: int) -> dict[str, float]:
        if isinstance(engine, TierEngine):
            found.append((engine.loads._ms_per_block / LOAD_MS, admission.BUS_AHEAD_MS))
        return dict.fromkeys(modelled.ROWS, 2.0)

    monkeypatch.setattr(modelled, "played", played)
    options = ["--seeds", "1", "--slower", "1,20", "--set", "BUS_AHEAD_MS=7,8.5"]
    monkeypatch.setattr("sys.argv", ["modelled", *options])
    assert modelled.main() == 0
    assert found == [(pytest.approx(one), ms) for one in (1, 20) for ms in (7, 8.5)]
