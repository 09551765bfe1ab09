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
    assert min(row[name] for name in ("stored_us", "loaded_us", *scale.COMMANDS)) > 0
    asked = Prompts(policy, 10 * PROMPT_BLOCKS)
    for _ in range(12):
        asked.store(asked.new())
    assert asked.load() > 0
    stats = asked.tier.stats
    moved = stats.stored, stats.evicted, stats.loaded
    assert moved == (12 * PROMPT_BLOCKS, 2 * PROMPT_BLOCKS, PROMPT_BLOCKS)


def test_commands_find_a_full_tier_and_leave_what_they_should(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, begin = list[Prompts](), Prompts.__init__

    def noted(self: Prompts, *args: object) -> None:
        begin(self, *args)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(Prompts, "__init__", noted)
    scale.commanded("arc", 10 * PROMPT_BLOCKS)
    used = [(asked.tier.num_slots, asked.tier.num_used) for asked in made]
    assert used == [(5 * PROMPT_BLOCKS, 5 * PROMPT_BLOCKS), (10 * PROMPT_BLOCKS, 0)]
    assert [asked.tier.stats.stored for asked in made] == 2 * [10 * PROMPT_BLOCKS]


def test_the_table_has_a_line_for_each_policy_and_a_column_for_each_size() -> None:
    rows = [
        {
            "policy": policy, "slots": slots, "stored_us": us, "loaded_us": us / 2,
            "set_us": us / 4, "resize_us": us / 5, "empty_us": us / 10,
        }
        for policy, us in (("lru", 1.0), ("arc", 2.0))
        for slots in (1000, 100)
    ]  # fmt: skip
    about = {"commit": "abc", "date": "2026-01-01T00:00", "cpu": "one", "command": "this"}
    made = scale.page({"machine": about, "rows": rows}).splitlines()
    assert [cell.strip() for cell in made[0].split("|")[2:4]] == ["100 slots", "1,000 slots"]
    assert [cell.strip() for cell in made[2].split("|")[1:4]] == ["lru", *2 * ["1.00; 0.50"]]
    assert [cell.strip() for cell in made[7].split("|")[1:3]] == ["lru", "0.25; 0.20; 0.10"]
    assert made[-1] == "Commit abc, 2026-01-01, one: `this`."


def test_the_results_have_every_policy_and_a_million_slots() -> None:
    rows = page.read(scale.RESULTS)["rows"]
    assert {(row["policy"], row["slots"]) for row in rows} == {
        (policy, slots) for policy in EVICTIONS for slots in scale.SLOTS
    }
    assert max(scale.SLOTS) == 10**6
