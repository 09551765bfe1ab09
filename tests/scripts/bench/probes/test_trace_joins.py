"""What a join costs, on made-up steps whose times are known."""

from __future__ import annotations

import pytest

from scripts.bench.probes.trace_events import Period, Request, Step, Trace
from scripts.bench.probes.trace_joins import APART, LEAST, joins_alone

DECODE, JOIN = 0.008, 0.020  # seconds
SPACE = 3 * APART  # steps from join to join


def trace(joins: int, ahead: int | None = 1, together: bool = False) -> Trace:
    """Steps one after the other, so many of which one request joins, or two next to each other."""
    steps, requests, now = [], {}, 1.0
    for number in range(SPACE * (joins + 1)):
        new = [number] if number and number % SPACE == 0 else []
        if together and number % SPACE == 1:
            new = [number]
        over = now + (JOIN if new else DECODE)
        host = {"launches": 12.0 if new else 2.0}
        steps.append(Step(now, over, bool(new), host_ms=host, scheduled=now, new=new))
        if new:
            begun = None if ahead is None else now - DECODE * ahead - 0.001
            requests[number] = Request(number, arrived=now - 0.005, begun=begun, tokens=[over])
        now = over
    periods = [Period(1, "on", 0.0, 1e9)]
    return Trace({}, requests, steps, periods, [])


@pytest.mark.parametrize("ahead", [None, 0, 1, 2])
def test_the_cost_is_what_the_steps_around_take_longer(ahead: int | None) -> None:
    (row,) = joins_alone(trace(LEAST, ahead), drop_s=0.0)
    assert (row["variant"], row["joins"], row["launches"]) == ("on", LEAST, 12.0)
    assert row["steps_ahead"] == ahead
    assert row["cost"] == row["cost_mean"] == pytest.approx(1000 * (JOIN - DECODE))
    assert row["first"] == pytest.approx(1000 * (JOIN + 0.005))


def test_requests_that_join_near_each_other_do_not_count() -> None:
    assert joins_alone(trace(2 * LEAST, together=True), drop_s=0.0) == []


def test_a_load_that_begins_near_another_ones_join_counts_that_one_out() -> None:
    made = trace(LEAST)
    made.requests[-1] = Request(-1, begun=made.steps[SPACE + 1].scheduled)
    assert joins_alone(made, drop_s=0.0) == [], "one is fewer than are told"


def test_few_joins_and_what_was_switched_just_before_say_nothing() -> None:
    assert joins_alone(trace(LEAST - 1), drop_s=0.0) == []
    assert joins_alone(trace(LEAST), drop_s=1e6) == []
