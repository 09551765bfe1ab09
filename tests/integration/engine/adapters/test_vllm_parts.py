"""Keys of parts of blocks, where hits may end within a block."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import BLOCK, Mini
from scheduler_half.drafts import Drafter
from scheduler_half.scenarios import nothing_held, prompt
from scheduler_half.sizes import Replicated
from scheduler_half.states import STATE

from kvoffload_patch.integration.engine.adapters.prefix_groups import split
from kvoffload_patch.integration.install import older_than


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


@pytest.mark.skipif(older_than("0.31"), reason="no group that ranks do not divide")
def test_a_whole_state_that_gets_its_key_as_a_part_does_is_stored_and_told_of() -> None:
    """As where vLLM keeps few states, and leaves the last block of a drafting model out of hits."""
    about = {"windows": (None, STATE, Replicated(BLOCK)), "shards": 2, "blocks": 120}
    drafter = Drafter(1, seed=1, reads_layers=True, always=False)
    mini = Mini(drafter=drafter, events=True, retention=0, store="eager", **about)
    mini.add(prompt(4, seed=1, tail=4), count=1)
    mini.run()
    mini.settle()
    mini.check()
    stored = [split(key)[1] for key in mini.manager._slot_of if mini.manager.lookup(key)]
    told = [block for block in mini.replay.held["CPU"] if block[1] == 1]
    assert stored.count(1) == len(told) == 1


def test_the_function_is_the_pools_own_again_in_the_end(mini: Mini) -> None:
    assert "cache_partial_block" in vars(mini.pool)
    mini.breaker.withdraw()
    assert "cache_partial_block" not in vars(mini.pool)
    assert mini.changed() == mini.before
