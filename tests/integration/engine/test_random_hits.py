"""Random hits over vLLM's own scheduler, always the same ones; `scripts/matrix random --hits`."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("vllm")

from integration.engine import random_room
from integration.engine.random_hits import WAYS, describe, run
from scheduler_half.scenarios import NotThere

SEEDS = range(12)
ROOM_SEEDS = (*range(40), 263, 274)


@pytest.mark.parametrize(("load_mode", "one_by_one"), WAYS)
def test_as_much_is_hit_as_where_the_gpu_has_lost_nothing(load_mode: str, one_by_one: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        try:
            seen.update(run(seed, load_mode, one_by_one))
        except NotThere:
            seen["absent"] += 1
    assert seen["runs"] >= len(SEEDS) / 2 and seen["loaded"] > 200 and seen["hit"] > 5000, seen


def test_all_that_was_computed_is_found_again_however_little_of_it_the_gpu_holds() -> None:
    results = {seed: random_room.run(seed) for seed in ROOM_SEEDS}
    lost = {seed: result for seed, result in results.items() if result[0] != result[1]}
    assert not lost, f"of seed: (tokens found, computed before): {lost}"
    assert sum(found for found, _ in results.values()) > 30_000


def test_the_runs_are_of_many_kinds() -> None:
    abouts = [describe(seed) for seed in range(100)]
    assert len({about["windows"] for about in abouts}) > 10
    assert {about["policy"] for about in abouts} == {"fcfs", "priority"}
    assert {about["retention"] for about in abouts} == {None, 0, 64}
    drafters = [about["drafter"] for about in abouts]
    assert {one and one.use_eagle() for one in drafters} == {None, True, False}
