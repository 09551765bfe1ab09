"""The arithmetic model finds what is wrong, and its copies are as late as they may be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_half.device import BLOCK, Device, answer
from tier.plans import a_load, a_plan, a_store

from kvoffload_patch.links import LOAD, STORE

PROMPT = list(range(10, 10 + 3 * BLOCK + 1))


def device(late: int = 0, windows: tuple[int | None, ...] = (None,), **more: Any) -> Device:
    return Device(20, 8, windows, late, more.get("fails", lambda direction, ticket: False))


def step(dev: Device, tables: Any, start: int = 0, plan: Any = None, **more: Any) -> list[int]:
    """One request is new, with these blocks and so many tokens computed: the tokens sampled."""
    new = SimpleNamespace(req_id="a", block_ids=tables, num_computed_tokens=start)
    scheduled = SimpleNamespace(
        finished_req_ids=(),
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=[],
        num_scheduled_tokens={"a": len(PROMPT) - start},
        **more,
    )
    return dev.step(scheduled, plan, lambda name: list(PROMPT))[1][0]


def nothing(dev: Device, plan: Any = None) -> Any:
    """A step without tokens: what is done of the copies."""
    scheduled = SimpleNamespace(
        finished_req_ids=(),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=[],
        num_scheduled_tokens={},
    )
    return dev.step(scheduled, plan, list)[2]


@pytest.mark.parametrize("lost", [None, 1, 3])
def test_every_block_that_is_read_makes_the_token(lost: int | None) -> None:
    dev = device()
    assert step(dev, ([1, 2, 3, 4],)) == answer(PROMPT, 1)
    if lost is not None:
        dev.kv[lost][5] += 1
    found = step(dev, ([1, 2, 3, 9],), start=3 * BLOCK)
    assert (found == answer(PROMPT, 1)) == (lost is None)


@pytest.mark.parametrize(("lost", "seen"), [(11, False), (12, True)])
def test_a_window_is_read_and_no_more(lost: int, seen: bool) -> None:
    dev = device(windows=(None, BLOCK + 1))
    step(dev, ([1, 2, 3, 4], [10, 11, 12, 13]))
    dev.kv[lost][0] += 1
    found = step(dev, ([1, 2, 3, 4], [0, 11, 12, 13]), start=3 * BLOCK)
    assert (found != answer(PROMPT, 1)) == seen


def test_blocks_of_one_group_do_not_serve_another() -> None:
    dev = device(windows=(None, None))
    step(dev, ([1, 2, 3, 4], [11, 12, 13, 14]))
    assert step(dev, ([11, 2, 3, 4], [1, 12, 13, 14]), start=3 * BLOCK) != answer(PROMPT, 1)


def test_zeroed_blocks_are_lost() -> None:
    dev = device()
    step(dev, ([1, 2, 3, 4],))
    found = step(dev, ([1, 2, 3, 4],), start=3 * BLOCK, new_block_ids_to_zero=[2])
    assert found != answer(PROMPT, 1) and dev.zeroed[-1] == (2,)


def test_copies_are_made_when_somebody_waits_or_the_time_has_come() -> None:
    dev = device(late=2)
    step(dev, ([1, 2, 3, 4],), plan=a_plan(store=a_store(1, (1, 2, 3), (5, 6, 7))))
    assert dev.slots[5][0] == 0
    load = a_load(1, (14, 15, 16), (5, 6, 7))
    result = nothing(dev, a_plan(loads=(load,)))
    assert (result.done_on(LOAD), result.done_on(STORE)) == (0, 0) and dev.kv[14][0] == 0
    assert nothing(dev, a_plan(stores_done=1)).done_on(STORE) == 1
    assert nothing(dev).done_on(LOAD) == 1 and dev.kv[14] == dev.kv[1]
    assert step(dev, ([14, 15, 16, 9],), start=3 * BLOCK) == answer(PROMPT, 1)


def test_a_step_waits_for_what_its_plan_says() -> None:
    dev = device(late=9)
    store = a_store(1, (1, 2, 3), (5, 6, 7))
    step(dev, ([1, 2, 3, 4],), plan=a_plan(store=store))
    load = a_load(1, (14, 15, 16), (5, 6, 7))
    unwaited = a_plan(loads=(load,), stores_done=1)
    assert step(dev, ([14, 15, 16, 9],), 3 * BLOCK, unwaited) != answer(PROMPT, 1)
    waited = a_plan(loads=(a_load(2, load.target_ids, load.source_ids),), wait_load=2)
    assert step(dev, ([14, 15, 16, 9],), 3 * BLOCK, waited) == answer(PROMPT, 1)


def test_copies_that_fail_are_told_until_the_plan_knows() -> None:
    dev = device(fails=lambda direction, ticket: direction == "load")
    result = nothing(dev, a_plan(loads=(a_load(1, (14,), (5,)),)))
    assert result.failed_on(LOAD) == (1,) and nothing(dev).failed_on(LOAD) == (1,)
    assert nothing(dev, a_plan(loads_done=1)).failed_on(LOAD) == ()
