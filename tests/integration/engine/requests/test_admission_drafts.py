"""What is hit beside a drafting model, where there is no room for all who wait."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import Mini
from scheduler_half.drafts import Drafter
from scheduler_half.scenarios import prompt
from scheduler_half.sizes import BLOCK
from scheduler_half.states import STATE


def turns_beside_drafts(tier: bool) -> list[int]:
    """Hits of five conversations at a time beside a drafting model, of which four fit at a time."""
    drafter = Drafter(2, seed=1, reads_layers=True, always=False)
    shape, blocks = (None, STATE, None), 72 if tier else 400
    mini = Mini(windows=shape, drafter=drafter, blocks=blocks, late=3 * tier, num_slots=400,
                tier=tier, load_mode="parked")  # fmt: skip
    talks = [prompt(2, seed=n, tail=15) for n in range(10)]
    names: list[str] = []
    for turn in range(3):
        for lot in (talks[:5], talks[5:]):
            names += [mini.add(list(talk), count=2) for talk in lot]
            mini.run()
            for talk, name in zip(lot, names[-5:]):
                talk += mini.answers[name][:2] + prompt(0, seed=100 + turn, tail=11)
    mini.check()
    return [mini.hits[name] for name in names]


def test_who_finds_no_room_for_its_hit_beside_drafts_is_not_admitted_without_it() -> None:
    """By itself vLLM leaves the last block out, and finds no state before it: nothing is hit."""
    hits = turns_beside_drafts(tier=True)
    assert hits == turns_beside_drafts(tier=False) and min(hits[20:]) == 2 * BLOCK
