"""What watches the hits of random runs finds a hit that is lost, and names what is the load's."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import Mini
from integration.engine.random_found import Finds
from scheduler_half.scenarios import prompt


def watched(**more: Any) -> tuple[Mini, Finds]:
    mini = Mini(load_mode="inline", **more)
    return mini, Finds(mini, watches=True)


def test_a_hit_that_the_tier_drops_is_found() -> None:
    mini, finds = watched(store="eager")
    mini.only_in_cpu(prompt(4, seed=1))
    pool = mini.tier._admission._pool
    look_up, pool.look_up = pool.look_up, lambda request, **_: look_up(request, max_tier_hits=0)
    name = mini.add(prompt(4, seed=1), count=1)
    mini.run()
    assert finds.found == {f"{name}, at once, found 0 of 64": 1}


@pytest.mark.parametrize("stored", [True, False])
def test_what_a_load_takes_is_named_only_if_the_tier_has_had_its_turn(stored: bool) -> None:
    """Its store fails, or was never begun; a load of one before it takes its blocks."""
    fails = set[str]()
    mini, finds = watched(store="eager", blocks=49, fails=lambda direction, _: direction in fails)
    mini.only_in_cpu(prompt(20, seed=1))
    fails.add("store")
    if not stored:
        mini.manager.offer = lambda *_: {}  # type: ignore[method-assign]
    for blocks, seed in ((4, 2), (36, 3)):  # the second one's are handed out later
        mini.add(prompt(blocks, seed), count=1)
        mini.run()
    mini.settle()
    mini.add(prompt(0, seed=4), count=9)
    mini.step()
    mini.add(prompt(20, seed=1), count=1)
    name = mini.add(prompt(4, seed=2), count=1)
    mini.run()
    mini.check()
    assert finds.found == ({} if stored else {f"{name}, at once, found 0 of 64": 1})
    assert finds.seen["less: loads before it took it"] == stored
