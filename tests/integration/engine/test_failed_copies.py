"""Copies that fail: no wrong token, no hang, no lost block, on vLLM's own scheduler."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import BLOCK, Mini
from scheduler_half.scenarios import nothing_held, talk

MODES = ["inline", "auto", "parked"]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("load_mode", MODES)
@pytest.mark.parametrize("in_flight", [1, 2])
def test_answers_are_right_whatever_fails(in_flight: int, load_mode: str, seed: int) -> None:
    rng = random.Random(seed)
    rate = {"load": rng.choice([0.3, 0.6]), "store": rng.choice([0.0, 0.2])}
    mini = Mini(
        fails=lambda direction, ticket: rng.random() < rate[direction],
        in_flight=in_flight,
        late=rng.randrange(3),
        load_mode=load_mode,
    )
    talk(mini, seed, turns=5, talks=11)
    stats = mini.manager.stats
    assert stats.failed and stats.loaded and stats.stored
    nothing_held(mini)


@pytest.mark.parametrize("event", ["preempted", "aborted"])
def test_a_reader_that_is_gone_before_the_failure_is_known(event: str) -> None:
    """Its token does not come out, and nobody reads what it has computed and cached."""
    mini = Mini(
        fails=lambda d, ticket: d == "load" and ticket == 1, in_flight=2, load_mode="inline"
    )
    prompt, other = list(range(100, 100 + 4 * BLOCK)), list(range(5000, 5000 + 24 * BLOCK - 1))
    for asked in (prompt[: 2 * BLOCK + 1], other):
        mini.add(asked, count=1)
        mini.run()
    name = mini.add(prompt)
    assert mini.begin_step().kvoffload_plan.loads
    if event == "preempted":
        mini.scheduler._preempt_request(mini.scheduler.running.pop(), 0.0)
    else:
        mini.abort(name)
    mini.end_step()
    again = mini.add(prompt)
    mini.run()
    mini.check()
    assert len(mini.answers[again]) == 4 and mini.manager.stats.failed == 2
