"""Estimates from the times of calls."""

from __future__ import annotations

import pytest

from kvoffload_patch.integration.engine.requests.pace import Pace


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def stepped(*seconds: float) -> tuple[Pace, Clock]:
    """One that has seen steps begin so long after one another."""
    clock = Clock()
    pace = Pace(2.0, 0.75, clock)
    pace.by_layer = True
    pace.step_begins()
    for interval in seconds:
        clock.time += interval
        pace.step_begins()
    return pace, clock


def test_a_step_begins_at_once_if_none_is_under_way() -> None:
    pace, _ = stepped(0.01, 0.01)
    assert pace.free_ms() == 0
    pace.in_flight += 1
    assert pace.free_ms() == pytest.approx(10)
    pace.in_flight -= 1
    assert pace.free_ms() == 0


def test_the_shorter_of_two_steps_says_how_long_one_takes() -> None:
    for intervals in ((0.03, 0.01), (0.01, 0.03)):
        pace, _ = stepped(*intervals)
        pace.in_flight += 1
        assert pace.free_ms() == pytest.approx(10)


def test_what_a_step_hides_is_no_longer_than_the_step_or_the_load() -> None:
    """Three of four groups of layers may be on their way when it begins."""
    pace, _ = stepped(0.03, 0.01)
    assert pace.hidden_ms(2) == pytest.approx(0.75 * 4)
    assert pace.hidden_ms(9) == pytest.approx(0.75 * 10)


def test_nothing_is_hidden_while_steps_wait_for_loads_as_a_whole() -> None:
    pace, _ = stepped(0.03, 0.01)
    pace.by_layer = False
    assert pace.hidden_ms(2) == 0


def test_loads_cross_one_after_the_other() -> None:
    pace, clock = stepped()
    first, second = pace.load_begins(3), pace.load_begins(2)
    assert (first, second) == (pytest.approx(100.006), pytest.approx(100.010))
    assert pace.ms_until(first) == pytest.approx(6) and pace.ms_until(second) == pytest.approx(10)
    clock.time += 1
    assert pace.ms_until(second) == 0
    assert pace.load_begins(1) == pytest.approx(101.002)


def test_what_loads_take_lately_counts() -> None:
    """Others may use the bus, or the host be late."""
    pace, clock = stepped(0.03, 0.03)
    pace.loads_take(2.5)
    assert (pace.slowdown, pace.ms_per_block) == (2.5, 5)
    assert pace.hidden_ms(2) == pytest.approx(0.75 * 10)
    assert pace.load_begins(4) == pytest.approx(clock.time + 0.02)
    pace.loads_take(1.0)
    assert pace.load_begins(4) == pytest.approx(clock.time + 0.028)
