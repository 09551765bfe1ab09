"""Whether what the tier has is loaded, or computed because that takes clearly less."""

from __future__ import annotations

import pytest
from integration.engine.mini import FakeRanks, Mini
from scheduler_half.device import BLOCK
from scheduler_half.scenarios import prompt

from kvoffload_patch.integration.engine.tuning import TRIED_LOADS

FOUR_BLOCKS = 4 * BLOCK


def asked_twice(load_ms: float, ms_per_token: float, times: int = 1, **more: str) -> Mini:
    """An engine whose GPU has lost a prompt of four blocks and a token, which is asked again."""
    mini = Mini(blocks=30, ranks=FakeRanks(load_ms), num_slots=2000, gpu_prefixes="whole", **more)
    assert mini.tier is not None
    mini.tier.pace.ms_per_token = ms_per_token
    asked = prompt(4, seed=1, tail=1)
    for turn in range(1 + times):
        mini.add(asked, 1)
        mini.run()
        for seed in range(8):  # others, until nothing of it is left on the GPU
            mini.add(prompt(4, seed=100 * (turn + 1) + seed), 1)
            mini.run()
    mini.check()
    return mini


def counted(mini: Mini) -> tuple[int, int]:
    """Tokens of hits that were loaded, and of those that were computed."""
    assert mini.tier is not None
    counts = mini.tier.counts()
    return counts.hit, counts.spared


def test_a_hit_is_loaded_where_nobody_knows_what_computing_it_takes() -> None:
    assert counted(asked_twice(load_ms=15.0, ms_per_token=0.0)) == (FOUR_BLOCKS, 0)


def test_a_hit_is_loaded_unless_that_takes_clearly_longer() -> None:
    same = 15.0 / BLOCK
    assert counted(asked_twice(load_ms=15.0, ms_per_token=same)) == (FOUR_BLOCKS, 0)
    assert counted(asked_twice(load_ms=15.0, ms_per_token=same / 2)) == (0, FOUR_BLOCKS)


def test_one_hit_of_some_is_loaded_all_the_same() -> None:
    loaded, computed = counted(asked_twice(15.0, 0.01, times=TRIED_LOADS))
    assert (loaded, computed) == (FOUR_BLOCKS, (TRIED_LOADS - 1) * FOUR_BLOCKS)


def test_who_asks_for_it_has_every_hit_loaded() -> None:
    assert counted(asked_twice(15.0, 0.01, recompute="never")) == (FOUR_BLOCKS, 0)


@pytest.mark.parametrize("load_mode", ["inline", "parked"])
def test_what_a_load_of_another_brings_is_waited_for(load_mode: str) -> None:
    """It crosses the bus anyway."""
    mini = Mini(blocks=30, ranks=FakeRanks(15.0), load_mode=load_mode, late=2)
    assert mini.tier is not None
    asked = prompt(4, seed=1, tail=1)
    mini.add(asked, 1)
    mini.run()
    for seed in range(8):
        mini.add(prompt(4, seed=100 + seed), 1)
        mini.run()
    mini.add(asked, 1)
    mini.step()
    mini.tier.pace.ms_per_token = 0.01
    mini.add(asked, 1)
    mini.run()
    mini.check()
    assert mini.tier.counts().spared == 0
