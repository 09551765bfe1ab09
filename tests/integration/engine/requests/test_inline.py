"""What inline loads make the requests of a step wait."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from kvoffload_patch.integration.engine.requests.inline import Stall, in_words


def make(
    ms_per_block: float,
    limit_ms: float,
    requests: int,
    blocks_ahead: int,
    free_ms: float = 0.0,
    awaited_ms: float = 0.0,
    stalled_ms: float = 0.0,
    hidden_ms: Callable[[int], float] = lambda blocks: 0.0,
) -> Stall:
    pace = SimpleNamespace(ms_per_block=ms_per_block, free_ms=lambda: free_ms, hidden_ms=hidden_ms)
    return Stall(cast("Any", pace), limit_ms, requests, blocks_ahead, awaited_ms, stalled_ms)


def test_a_stall_counts_everybody_who_waits() -> None:
    stall = make(ms_per_block=2.0, limit_ms=100, requests=3, blocks_ahead=0)
    assert stall.allows(16) and not stall.allows(17)
    assert stall.add_inline(10) == 60
    stall.admit()
    assert stall.allows(2) and not stall.allows(3)  # 4 requests x 2 ms a block, and 20 ms
    stall.add_parked(5)
    assert not stall.allows(1)


def test_what_crosses_before_the_step_begins_makes_nobody_wait() -> None:
    stall = make(ms_per_block=2.0, limit_ms=0, requests=9, blocks_ahead=4, free_ms=20)
    assert stall.allows(6) and not stall.allows(7)
    stall.add_inline(6)
    assert not stall.allows(1)


def test_loads_under_way_are_waited_for_first_and_once() -> None:
    stall = make(ms_per_block=1.0, limit_ms=90, requests=1, blocks_ahead=20)
    # The other one waits for the 20 ahead and for these, this one for the 20.
    assert stall.allows(50) and not stall.allows(51)
    stall.add_inline(10)  # 50 ms
    # The other one waits for the 30 anyway; the next one does, too.
    assert stall.allows(10) and not stall.allows(11)


def test_loads_that_the_step_waits_for_already_cross_first_and_use_the_limit_up() -> None:
    # 4 ms of the 10 ms come after the step could begin: 2 others wait for them, 8 ms of 20.
    stall = make(
        1.0, limit_ms=20, requests=2, blocks_ahead=0, free_ms=6, awaited_ms=10, stalled_ms=4
    )
    # Each block more is waited for by 2 others, and this one waits for the 4 ms.
    assert stall.allows(4) and not stall.allows(5)
    assert not make(1.0, 20, 2, 3, 6, 10, 4).allows(2), "there are others before it"


def test_what_a_step_hides_makes_nobody_wait() -> None:
    """Three of four blocks may still be on their way when the step begins, up to six."""
    stall = make(1.0, 0, 9, 0, free_ms=2, hidden_ms=lambda blocks: min(6, blocks * 3 // 4))
    assert stall.allows(8) and not stall.allows(9)
    assert stall.add_inline(8) == 0
    assert not stall.allows(1), "the 8 cross before it"


def test_a_load_that_nobody_waits_for_yet_can_be_long() -> None:
    stall = make(ms_per_block=1.0, limit_ms=20, requests=0, blocks_ahead=0)
    assert stall.allows(1000)
    stall.add_inline(1000)
    stall.admit()
    assert not stall.allows(21)


def test_it_is_said_which_loads_are_compared() -> None:
    until = ", compared with loads until one is right, then with 1 in "
    assert in_words("sample", "auto") == in_words("sample", "parked") == until + "256"
    assert in_words("full", "parked") == ", compared with every load"
    assert in_words("sample", "inline") == ", compared with no load, because loads are inline"
