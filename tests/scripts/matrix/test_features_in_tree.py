"""What is said of vLLM's own connectors is said of what the tier refuses, and of nothing else."""

from __future__ import annotations

from scripts.matrix import features, features_in_tree
from scripts.matrix.features_rows import ROWS
from scripts.matrix.features_rows_refused import is_refused


def test_every_row_that_is_refused_is_told_of() -> None:
    names = [row.name for row in ROWS if is_refused(row)]
    assert list(features_in_tree.SAID) == names and len(names) > 10


def test_no_cell_is_empty() -> None:
    table = [line for line in features_in_tree.table() if line.startswith("| ")][2:]
    assert len(table) == len(features_in_tree.SAID)
    for line in table:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 3 and all(cells), line


def test_they_are_on_the_page() -> None:
    assert set(features_in_tree.table()[2:]) <= set(features.page({}).splitlines())
