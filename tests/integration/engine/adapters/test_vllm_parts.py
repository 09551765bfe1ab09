"""Keys of parts of blocks, where hits may end within a block."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import BLOCK, Mini
from scheduler_half.scenarios import nothing_held, prompt
from scheduler_half.states import STATE


@pytest.fixture
def mini() -> Mini:
    made = Mini(windows=(None, STATE), blocks=120, unit=4, policy="priority")
    if not made.view.groups.parts:
        pytest.skip("this release has no hits that end within a block")
    return made


def test_nobody_hits_a_part_that_its_request_was_preempted_before_it_computed(mini: Mini) -> None:
    """Or what is computed upon it is stored, and hit when the GPU has lost it."""
    asked = prompt(18, seed=1, tail=14)
    low = mini.scheduler.requests[mini.add(asked, count=4, priority=5)]
    mini.step()
    high = mini.add(prompt(1, seed=2, tail=4), count=8)
    mini.step()
    assert low.num_computed_tokens == 18 * BLOCK
    taken = mini.pool.get_new_blocks(mini.pool.get_num_free_blocks() - 2)
    scheduled = mini.begin_step()
    assert list(scheduled.num_scheduled_tokens) == [high] and low.status.name == "PREEMPTED"
    mini.end_step()
    mini.pool.free_blocks(taken)
    mini.run()
    upon = asked[: 18 * BLOCK + 12] + prompt(2, seed=3)
    for _ in range(2):
        name = mini.add(upon, count=4)
        mini.run()
        mini.check()
        assert mini.hits[name] > 18 * BLOCK
        mini.settle()
        mini.pool.free_blocks(mini.pool.get_new_blocks(mini.pool.get_num_free_blocks()))
    nothing_held(mini)


def test_keys_of_a_step_that_is_computed_stay(mini: Mini) -> None:
    mini.add(prompt(3, seed=1, tail=14), count=1)
    mini.run()
    name = mini.add(prompt(3, seed=1, tail=14), count=1)
    mini.run()
    mini.check()
    assert mini.hits[name] == 3 * BLOCK + 12


def test_the_function_is_the_pools_own_again_in_the_end(mini: Mini) -> None:
    assert "cache_partial_block" in vars(mini.pool)
    mini.breaker.withdraw()
    assert "cache_partial_block" not in vars(mini.pool)
    assert mini.changed() == mini.before
