"""Steps of the engine by the times of clients' tokens."""

from __future__ import annotations

import pytest

from scripts.bench.chats.steps import steps


def test_tokens_that_come_together_are_a_step_and_steps_are_of_three_kinds() -> None:
    running = [1.000, 1.010, 1.021, 1.041, 1.046, 1.056]  # 1.041: the host launches a join
    joins = [1.0465, 1.0562]
    assert steps([running, joins]) == {
        "decodes": {"count": 3, "ms": pytest.approx((10 + 11 + 10) / 3, abs=0.01)},
        "before a join": {"count": 1, "ms": 20.0},
        "join": {"count": 1, "ms": 5.0},
    }


def test_a_step_that_one_joins_before_another_is_a_join() -> None:
    assert steps([[0.0, 0.01, 0.03], [0.01, 0.03], [0.0301]]) == {"join": {"count": 2, "ms": 15.0}}


def test_a_single_step_has_no_step_before() -> None:
    assert steps([]) == steps([[1.0], [1.001]]) == {}
