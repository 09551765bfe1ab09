"""Loads between two steps: what they wait for, and what they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tier.plans import a_load, a_plan, a_store
from transfer.engine_rank import EngineRank
from transfer.fake_cuda import Wait

SEEDS = range(20)


@pytest.fixture(params=SEEDS)
def rank(request: pytest.FixtureRequest) -> EngineRank:
    """Slot 0 holds "loaded", GPU blocks what they are called."""
    made = EngineRank()
    made.cuda.random.seed(request.param)
    made.slots[0] = "loaded"
    made.gpu.update({block: f"block {block}" for block in range(6)})
    made.engine.mark_steps()
    return made


def step(rank: EngineRank, plan: Any, compute: Callable[[], object]) -> None:
    """A whole step, whose forward pass is this."""
    rank.engine.begin_step(plan)
    rank.cuda.current.append(compute)
    rank.engine.end_step()


def run(rank: EngineRank) -> None:
    """All that can go on, as the copy thread and the device would have it."""
    while rank.loads.advance() or rank.stores.advance() or rank.cuda.run_one():
        pass


def test_they_do_not_wait_for_the_step_under_way(rank: EngineRank) -> None:
    over = False
    with rank.cuda:
        step(rank, None, int)
        rank.engine.begin_step(None)
        rank.cuda.current.work.append(Wait(lambda: over))
        rank.engine.end_step()
        rank.engine.load_ahead(a_plan((a_load(1, (3,), (0,)),)))
        for _ in range(200):
            rank.loads.advance()
            for stream in rank.cuda.streams:
                if stream.can_go_on():
                    stream.go_on()
        assert rank.gpu[3] == "loaded"
        over = True
        run(rank)


def test_they_wait_for_the_steps_before_it(rank: EngineRank) -> None:
    read = list[Any]()
    with rank.cuda:
        step(rank, None, lambda: read.append(rank.gpu[3]))
        step(rank, None, int)
        rank.engine.load_ahead(a_plan((a_load(1, (3,), (0,)),)))
        run(rank)
    assert read == ["block 3"]
    assert rank.gpu[3] == "loaded"


def test_they_wait_for_stores_of_what_they_overwrite(rank: EngineRank) -> None:
    with rank.cuda:
        step(rank, a_plan(store=a_store(1, (3,), (1,))), int)
        step(rank, None, int)
        rank.engine.load_ahead(a_plan((a_load(1, (3,), (0,)),), wait_store=1))
        run(rank)
    assert rank.slots[1] == "block 3"
    assert rank.gpu[3] == "loaded"


def test_a_step_whose_end_is_to_come_says_so(rank: EngineRank) -> None:
    with rank.cuda:
        rank.engine.begin_step(a_plan(store=a_store(1, (3,), (1,))))
        assert not rank.engine.step_ended
        rank.engine.end_step()
        assert rank.engine.step_ended
        run(rank)


def test_the_end_of_each_step_is_told_apart(rank: EngineRank) -> None:
    with rank.cuda:
        step(rank, None, int)
        first = rank.engine.mark_end()
        step(rank, None, int)
        second = rank.engine.mark_end()
        while not first():
            assert not second()
            assert rank.cuda.run_one()
        run(rank)
        assert second()
