"""docs/performance.md shows what the results in docs/measured/current say."""

from __future__ import annotations

import pytest

from scripts.bench import page


def test_the_tables_are_those_of_the_results() -> None:
    assert page.filled(page.PAGE.read_text()) == page.PAGE.read_text()


@pytest.mark.parametrize("name", page.TABLES)
def test_every_table_has_its_place(name: str) -> None:
    text = page.PAGE.read_text()
    assert text.count(f"<!-- table: {name} -->") == text.count(f"<!-- end: {name} -->") == 1


def test_a_cell_has_median_smallest_and_largest() -> None:
    assert page.cell([0.0301, 0.02, 0.04], 1000) == "30.1 (20 to 40)"
    assert page.cell([]) == "-"


def test_a_changed_table_is_made_anew() -> None:
    text = page.PAGE.read_text().replace("| nothing ", "| something ", 1)
    assert page.filled(text) == page.PAGE.read_text() != text
