"""The pages of figures and README.md show what the results in docs/measured/current say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.bench import page, tables

MECHANISMS = page.DOCS / "mechanisms.md"
# Beside the tables: what is read in three minutes, at 238 words a minute (Brysbaert 2019, a review
# of reading rates).
WORDS = 714


@pytest.mark.parametrize("path", page.PAGES, ids=lambda path: path.name)
def test_the_tables_are_those_of_the_results(path: Path) -> None:
    assert page.filled(path.read_text()) == path.read_text()


@pytest.mark.parametrize("name", tables.TABLES)
def test_every_table_has_its_place(name: str) -> None:
    text = "".join(path.read_text() for path in page.PAGES)
    assert text.count(f"<!-- table: {name} -->") == text.count(f"<!-- end: {name} -->") == 1


def test_the_page_on_performance_is_read_in_three_minutes() -> None:
    text = (page.DOCS / "performance.md").read_text()
    words = re.sub("<!-- table.*?<!-- end.*?-->", "", text, flags=re.DOTALL).split()
    assert len(words) <= WORDS


def test_a_changed_table_is_made_again() -> None:
    text = MECHANISMS.read_text().replace("| nothing ", "| something ", 1)
    assert page.filled(text) == MECHANISMS.read_text() != text


def test_the_readme_has_one_number_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.README.read_text()
    monkeypatch.setattr(tables, "read", lambda name: None)
    assert page.filled(text) == text, "not measured: left as it was"
    found = {"s1": {"ours": {"samples": [0.03, 0.02, 0.05]}}, "s3": {"off": {"samples": [14.0]}}}
    machine: dict[str, object] = {"commit": "abc", "date": "2026-11-22T10:00", "gpu": "H200, 1"}
    machine |= {"vllm": "0.26", "cpus": 16, "command": "bench"}
    monkeypatch.setattr(tables, "read", lambda name: {"machines": [machine]})
    monkeypatch.setattr(tables.serve, "figures", lambda document: found)
    made = page.filled(text)
    rows = [line.split("|")[2:-1] for line in made.splitlines() if "GPU holds 23; one" in line]
    rows += [line.split("|")[2:-1] for line in made.splitlines() if "are in CPU memory, ms" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [["14", "-"], ["-", "30"]]
    assert "Commit abc, 2026-11-22, H200, 16 cores, vLLM 0.26." in made
