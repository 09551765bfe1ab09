"""Figures of several seeds beside others."""

from __future__ import annotations

from scripts.simulate.spread import by_seed, change


def test_figures_are_in_the_order_of_their_seeds() -> None:
    rows = [{"seed": 2, "again": 7}, {"seed": 0, "again": 5}, {"seed": 1, "again": 6}]
    assert by_seed(rows, "again") == [5, 6, 7]


def test_a_change_has_the_least_and_the_most_of_one_seed() -> None:
    assert change([90, 50], [100, 100]) == "-30.0 % (-50.0 to -10.0)"
    assert change([110, 190], [100, 200], places=0) == "+0 % (-5 to +10)"
