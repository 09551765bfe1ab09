"""A bus that takes a second a block each way."""

from __future__ import annotations

from tier.plans import a_load, a_plan, a_result, a_store

from kvoffload_patch.links import LOAD, STORE
from scripts.simulate.bus import Bus

NEVER = float("inf")


def test_transfers_of_a_direction_are_done_in_their_order() -> None:
    bus = Bus(10**9, load_gbs=1.0, store_gbs=0.5)
    first = a_plan([a_load(1, [0, 1], [0, 1]), a_load(2, [2], [2])], a_store(1, [3], [3]))
    assert bus.start(first, 10.0) == 10.0
    bus.finish(first, 11.0)
    assert bus.next_load() == 12.0
    assert bus.result(12.5) == a_result(1, 0)
    assert bus.result(13.0) == a_result(2, 1), "a store takes 2 s"
    assert bus.next_load() == NEVER
    assert (bus.moved(LOAD), bus.moved(STORE)) == (3, 1)


def test_a_forward_pass_begins_when_what_it_waits_for_is_done() -> None:
    bus = Bus(10**9, load_gbs=1.0, store_gbs=1.0)
    bus.finish(a_plan(store=a_store(1, [1, 2], [1, 2])), 0.0)
    assert bus.start(a_plan(wait_store=1), 0.5) == 2.0
    bus.result(2.0)
    bus.finish(a_plan(store=a_store(2, [1], [1])), 2.0)
    assert bus.start(a_plan(wait_store=1), 2.0) == 2.0, "the later store is not waited for"
