"""Other rules for loads, worked out by hand, and the tables that are made of them."""

from __future__ import annotations

import pytest

from scripts.simulate import loads, page
from scripts.simulate.model import Figures, LoadRules, Machine, Model
from scripts.simulate.rules import Rules
from scripts.simulate.trace import Request

# As in test_model: a prompt's block takes 1 s, the bus 0.5 s a block each way.
MACHINE = Machine(
    gpu_blocks=4, cpu_blocks=8, block_tokens=4, token_bytes=1, load_gbs=8e-9, store_gbs=8e-9,
    prefill=4.0, token_s=1.0, step_tokens=8,
)  # fmt: skip
THREE = Request(0.0, 9, 2, (1, 2)), Request(10.0, 9, 2, (3, 4)), Request(20.0, 9, 2, (1, 2))


def run(machine: Machine, rules: LoadRules, *trace: Request) -> Figures:
    return Model(machine, Rules(8), trace, rules).run()


@pytest.mark.parametrize(("load_gbs", "loaded"), [(8e-9, 1), (2.7e-9, 1), (2.6e-9, 0)])
def test_what_takes_clearly_longer_to_load_than_to_compute_is_computed(
    load_gbs: float, loaded: int
) -> None:
    machine = MACHINE._replace(load_gbs=load_gbs)
    found = run(machine, LoadRules(measured=True), *THREE)
    assert (found.loaded, found.again) == (loaded, 1 - loaded)
    assert run(machine, LoadRules(), *THREE).loaded == 1


def test_a_load_ahead_of_its_run_slot_is_done_when_there_is_one() -> None:
    machine = MACHINE._replace(running=1, gpu_blocks=6)
    others = Request(10.0, 9, 2, (3, 4)), Request(20.0, 9, 2, (5, 6))
    trace = (Request(0.0, 9, 2, (1, 2)), *others, Request(20.5, 9, 2, (1, 2)))
    plain, ahead = (run(machine, LoadRules(ahead=count), *trace) for count in (0, 1))
    assert plain.loaded == ahead.loaded == 1
    assert plain.first_token[:3] == ahead.first_token[:3]
    assert plain.first_token[3] - ahead.first_token[3] == pytest.approx(0.5)


def test_one_that_waits_for_a_slot_gives_its_blocks_back_first() -> None:
    machine = MACHINE._replace(running=1, gpu_blocks=5, preempt=True)
    two = Request(0.0, 5, 14, (1, 2, 3, 4)), Request(0.5, 5, 2, (5,))
    found = run(machine, LoadRules(ahead=1), *two)
    assert found.preempted == 1 and found.first_token[0] == pytest.approx(1.25)


def test_the_results_have_every_question_machine_trace_and_seed() -> None:
    rows = page.read(loads.RESULTS)["rows"]
    found = {(r["question"], r["varied"], r["trace"], r["seed"]) for r in rows}
    assert found == {
        (question, varied, trace, seed)
        for question, (machines, _) in loads.QUESTIONS.items()
        for varied in machines
        for trace in loads.TRACES
        for seed in loads.SEEDS
    }


def test_a_replay_has_the_figures_of_the_results() -> None:
    row = loads.replayed(("recompute", 1.6, "documents", 4, 60.0))
    (same,) = (
        r
        for r in page.read(loads.RESULTS)["rows"]
        if (r["question"], r["varied"], r["trace"], r["seed"]) == ("recompute", 1.6, "documents", 4)
    )
    assert set(row) == set(same) and set(row["on"]) == set(same["on"])
    assert row["on"]["loaded"] <= row["off"]["loaded"]
