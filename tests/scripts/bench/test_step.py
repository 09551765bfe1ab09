"""Every scheduler that the step benchmark compares does the work that it is timed for."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from scripts.bench.step_sides import SIDES, Sim


def answer(sim: Sim, seed: int, tokens: int) -> None:
    sim.add(seed, tokens, 1)
    for _ in range(20):
        sim.step()
        if not sim.scheduler.has_unfinished_requests():
            return
    raise AssertionError("a request is never answered")


@pytest.mark.parametrize("side", SIDES)
def test_a_prompt_that_left_the_gpu_is_loaded_by_all_but_the_plain_scheduler(side: str) -> None:
    sim = SIDES[side](slots=4, blocks=24)
    for seed in (1, 2, 1):  # of 20 blocks each, one at a time on the GPU
        answer(sim, seed, tokens=20 * 16 + 1)
    works = side != "plain"
    assert (sim.stored >= 40, sim.loaded >= 18) == (works, works)
