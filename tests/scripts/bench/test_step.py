"""Every scheduler that the step benchmark compares does the work that it is timed for."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from scripts.bench import step
from scripts.bench.step_sides import SIDES, Sim


def test_the_page_has_a_line_for_each_scheduler_and_says_whether_the_goal_is_met() -> None:
    times = {"plain": [[10.0, 12.0]] * 4, "tier": [[80.0, 90.0]] * 4}
    sides = {side: step._side(found, times["plain"], 16, 0, 0) for side, found in times.items()}
    rows = [{"name": "a", "title": "256 decode", "steps": 8, "sides": sides}]
    page = step.page({"rows": rows})
    assert [line.split("|")[2].strip() for line in page.splitlines()[2:4]] == ["plain", "tier"]
    assert "MISS  a, added to a step: 74 µs, at most 60 µs" in page


def answer(sim: Sim, seed: int, tokens: int) -> None:
    sim.add(seed, tokens, 1)
    for _ in range(20):
        sim.step()
        if not sim.scheduler.has_unfinished_requests():
            return
    raise AssertionError("a request is never answered")


@pytest.mark.parametrize("side", SIDES)
def test_a_prompt_that_left_the_gpu_is_loaded_by_all_that_do_anything(side: str) -> None:
    sim = SIDES[side](slots=4, blocks=24)
    for seed in (1, 2, 1):  # of 20 blocks each, one at a time on the GPU
        answer(sim, seed, tokens=20 * 16 + 1)
    works = side not in ("plain", "hooks")
    assert (sim.stored >= 40, sim.loaded >= 18, sim.found >= 18) == (works, works, works)


def test_what_the_tier_has_is_loaded_though_computing_takes_no_time() -> None:
    sim = SIDES["whole"](slots=4, blocks=24)
    for seed in (1, 2, 1):
        sim.breaker.tier.pace.ms_per_token = 1e-9
        answer(sim, seed, tokens=20 * 16 + 1)
    assert sim.loaded >= 18


def test_hooks_that_do_nothing_are_set_and_no_plan_is_made() -> None:
    sim = SIDES["hooks"](slots=4, blocks=24)
    assert {"schedule", "update_from_output"} <= vars(sim.scheduler).keys()
    answer(sim, seed=1, tokens=20 * 16 + 1)
    assert not sim.stored and not sim.manager.num_used


def test_the_goals_name_the_schedulers_that_were_played() -> None:
    sides = {"plain": step._side([[1.0, 2.0]] * 4, [[1.0, 2.0]] * 4, 0, 0, 0)}
    sides["hooks"] = step._side([[2.0, 4.0]] * 4, [[1.0, 2.0]] * 4, 0, 0, 0)
    first = step.goals([{"name": "a", "title": "256 decode", "sides": sides}]).splitlines()[0]
    assert [cell.strip() for cell in first.split("|")[1:-1]][1:] == ["goal of the tier", "hooks"]


def test_schedulers_are_made_early_and_late_equally_often() -> None:
    sides = ["plain", "tier", "eager", "simple"]
    orders = list(step._orders(sides, 8))
    assert len({tuple(order) for order in orders}) == 8
    assert {side: sum(order.index(side) for order in orders) for side in sides} == dict.fromkeys(
        sides, 12
    )
