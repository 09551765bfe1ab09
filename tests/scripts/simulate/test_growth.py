"""Replays of a tier that grows."""

from __future__ import annotations

from kvoffload_patch.links import LOAD
from scripts.simulate import growth
from scripts.simulate.growth import FIRST_SLOTS, GrowingBus, figures
from scripts.simulate.model import Machine


def test_a_bus_says_how_many_slots_are_usable_by_now() -> None:
    bus = GrowingBus(Machine(), slots=1000, seconds=50.0)
    found = [bus.result(now) for now in (0.0, 25.0, 49.99, 50.0, 90.0)]
    assert [result.num_slots for result in found] == [FIRST_SLOTS, 500, 999, 1000, 1000]
    assert [result.growing for result in found] == [True, True, True, False, False]
    assert dict(found[0].done)[LOAD] == 0


def test_what_the_gpu_is_about_to_lose_is_kept_while_the_tier_grows() -> None:
    waits, evicts = (figures("agents", side, "eager", 0, 600.0, 900.0) for side in growth.SIDES)
    assert evicts.again < 0.7 * waits.again
    assert evicts.evicted > waits.evicted


def test_the_table_compares_within_a_trace() -> None:
    rows = []
    for trace in growth.TRACES:
        for share in growth.SHARES:
            for store in growth.STORES:
                row = {"trace": trace, "share": share, "store": store, "first_token_mean": 2.0}
                row["seed"] = 0
                rows += [{**row, "side": "waits", "again": 200}]
                rows += [{**row, "side": "evicts", "again": 100 if trace == "chat" else 220}]
    machine = {"commit": "abc", "date": "2026-11-23T10:00", "command": "growth"}
    made = growth.page({"machine": machine, "seconds": 1800.0, "rows": rows}).splitlines()
    cells = [cell.strip() for cell in made[2].split("|")[1:-1]]
    assert cells[:3] == [
        "eager, grows for 1800 s of 1800: tokens recomputed",
        "-50 % (-50 to -50)",
        "+10 % (+10 to +10)",
    ]
    assert "+0 %" in made[3] and "grows for 450 s" in made[6] and "Commit abc" in made[-1]
