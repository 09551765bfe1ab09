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
    assert (first, second) == (pytest.approx(100_006), pytest.approx(100_010))
    assert pace.ms_until(first) == pytest.approx(6) and pace.ms_until(second) == pytest.approx(10)
    clock.time += 1
    assert pace.ms_until(second) == 0
    assert pace.load_begins(1) == pytest.approx(101_002)


def test_what_loads_take_lately_counts() -> None:
    """Others may use the bus, or the host be late."""
    pace, clock = stepped(0.03, 0.03)
    pace.loads_take(2.5)
    assert (pace.slowdown, pace.ms_per_block) == (2.5, 5)
    assert pace.hidden_ms(2) == pytest.approx(0.75 * 10)
    assert pace.load_begins(4) == pytest.approx(1000 * clock.time + 20)
    pace.loads_take(1.0)
    assert pace.load_begins(4) == pytest.approx(1000 * clock.time + 28)


class Step:
    """What `schedule` returns of a step with so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.total_num_scheduled_tokens = tokens


def carried_out(pace: Pace, clock: Clock, tokens: int, seconds: float, waits: bool = False) -> None:
    """A step that is scheduled when the one before has come back."""
    step = Step(tokens)
    pace.step_begins()
    pace.step_scheduled(step, waits)
    clock.time += seconds
    pace.step_returned(step)


def test_steps_that_compute_prompts_say_what_a_token_takes() -> None:
    pace, clock = stepped()
    carried_out(pace, clock, 64, 5.0)  # decodes
    assert pace.ms_per_token == 0, "nothing is known"
    assert not pace.computes_sooner(64, 1000)
    for _ in range(4):
        carried_out(pace, clock, 1024, 0.1)
        assert pace.ms_per_token == pytest.approx(100 / 1024)
    carried_out(pace, clock, 64, 5.0)
    carried_out(pace, clock, 1024, 5.0, waits=True)
    assert pace.ms_per_token == pytest.approx(100 / 1024)
    for _ in range(40):  # prompts get longer
        carried_out(pace, clock, 1024, 0.2)
    assert pace.ms_per_token == pytest.approx(200 / 1024, rel=0.01)


def test_a_step_is_timed_from_the_one_before_where_that_was_still_under_way() -> None:
    pace, clock = stepped()
    steps = [Step(2048) for _ in range(9)]
    pace.step_begins()
    pace.step_scheduled(steps[0], waits=False)
    for now, behind in zip(steps, steps[1:]):
        pace.step_begins()
        pace.step_scheduled(behind, waits=False)
        clock.time += 0.1
        pace.step_returned(now)
    assert pace.ms_per_token == pytest.approx(100 / 2048)


def test_steps_that_are_lost_or_come_twice_are_not_timed() -> None:
    pace, clock = stepped()
    for _ in range(40):
        pace.step_begins()
        pace.step_scheduled(Step(4096), waits=False)  # lost
    clock.time += 9
    pace.step_returned(Step(2048))  # nobody knows it
    assert pace.ms_per_token == 0
    for _ in range(4):
        carried_out(pace, clock, 2048, 0.1)
    assert pace.ms_per_token == pytest.approx(100 / 2048)


def test_a_prefix_is_computed_where_its_load_takes_clearly_longer() -> None:
    pace, clock = stepped()  # a block is loaded in 2 ms
    for _ in range(4):
        carried_out(pace, clock, 1000, 0.1)
    assert not pace.computes_sooner(100, 5), "both take 10 ms"
    assert not pace.computes_sooner(100, 7)
    assert pace.computes_sooner(100, 8)
    pace.loads_take(0.5)
    assert not pace.computes_sooner(100, 8), "the bus is twice as fast lately"
