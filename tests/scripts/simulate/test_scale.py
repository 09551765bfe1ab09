"""Costs of a block by size of the tier: what is played is a full tier, and the table shows it."""

from __future__ import annotations

import pytest

from kvoffload_patch.config import EVICTIONS
from scripts.simulate import page, scale
from scripts.simulate.scale import PROMPT_BLOCKS, Prompts


@pytest.mark.parametrize("policy", EVICTIONS)
def test_each_new_prompt_evicts_as_many_blocks_and_what_was_stored_is_loaded(policy: str) -> None:
    row = scale.played(policy, 10 * PROMPT_BLOCKS, prompts=3)
    assert row["policy"] == policy and row["slots"] == 10 * PROMPT_BLOCKS
    assert row["stored_us"] > 0 < row["loaded_us"]
    asked = Prompts(policy, 10 * PROMPT_BLOCKS)
    for _ in range(12):
        asked.store(asked.new())
    assert asked.load() > 0
    stats = asked.tier.stats
    moved = stats.stored, stats.evicted, stats.loaded
    assert moved == (12 * PROMPT_BLOCKS, 2 * PROMPT_BLOCKS, PROMPT_BLOCKS)


def test_the_table_has_a_line_for_each_policy_and_a_column_for_each_size() -> None:
    rows = [
        {"policy": policy, "slots": slots, "stored_us": us, "loaded_us": us / 2}
        for policy, us in (("lru", 1.0), ("arc", 2.0))
        for slots in (1000, 100)
    ]
    about = {"commit": "abc", "date": "2026-01-01T00:00", "cpu": "one", "command": "this"}
    made = scale.page({"machine": about, "rows": rows}).splitlines()
    assert [cell.strip() for cell in made[0].split("|")[2:4]] == ["100 slots", "1,000 slots"]
    assert [cell.strip() for cell in made[2].split("|")[1:4]] == ["lru", *2 * ["1.00; 0.50"]]
    assert made[-1] == "Commit abc, 2026-01-01, one: `this`."


def test_the_results_have_every_policy_and_a_million_slots() -> None:
    rows = page.read(scale.RESULTS)["rows"]
    assert {(row["policy"], row["slots"]) for row in rows} == {
        (policy, slots) for policy in EVICTIONS for slots in scale.SLOTS
    }
    assert max(scale.SLOTS) == 10**6
