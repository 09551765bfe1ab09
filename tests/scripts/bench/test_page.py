"""The pages on performance and README.md show what the results in docs/measured/current say."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench import page

PAGES = (page.PAGE, page.PARTS, page.README)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_tables_are_those_of_the_results(path: Path) -> None:
    assert page.filled(path.read_text()) == path.read_text()


@pytest.mark.parametrize("name", page.TABLES)
def test_every_table_has_its_place(name: str) -> None:
    text = "".join(path.read_text() for path in PAGES)
    assert text.count(f"<!-- table: {name} -->") == text.count(f"<!-- end: {name} -->") == 1


def test_a_cell_has_median_smallest_and_largest() -> None:
    assert page.cell([0.0301, 0.02, 0.04], 1000) == "30.1 (20 to 40)"
    assert page.cell([]) == "-"


def test_a_changed_table_is_made_again() -> None:
    text = page.PARTS.read_text().replace("| nothing ", "| something ", 1)
    assert page.filled(text) == page.PARTS.read_text() != text


def test_the_readme_has_one_number_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.README.read_text()
    monkeypatch.setattr(page, "read", lambda name: None)
    assert page.filled(text) == text, "not measured: left as it was"
    found = {"s1": {"ours": {"samples": [0.03, 0.02, 0.05]}}, "s3": {"off": {"samples": [14.0]}}}
    machine: dict[str, object] = {"commit": "abc", "date": "2026-11-22T10:00", "gpu": "H200, 1"}
    machine |= {"vllm": "0.26", "cpus": 16, "command": "bench"}
    monkeypatch.setattr(page, "read", lambda name: {"machines": [machine]})
    monkeypatch.setattr(page.serve, "figures", lambda document: found)
    made = page.filled(text)
    rows = [line.split("|")[2:-1] for line in made.splitlines() if "GPU holds 23; one" in line]
    rows += [line.split("|")[2:-1] for line in made.splitlines() if "are in CPU memory, ms" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [["14", "-"], ["-", "30"]]
    assert "Commit abc, 2026-11-22, H200, 16 cores, vLLM 0.26." in made


def test_conversations_have_a_table_once_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "read", lambda name: None)
    assert page.chats() == "not measured"
    machine: dict[str, object] = {"commit": "abc", "date": "2026-11-22T10:00", "gpu": "H200, 1"}
    machine |= {"vllm": "0.26", "cpus": 16, "command": "bench"}
    monkeypatch.setattr(page, "read", lambda name: {"machines": [machine, machine]})
    monkeypatch.setattr(page.chats_report, "tables", lambda document: "the tables")
    text = page.chats()
    assert text.startswith("the tables\n\nIn brackets the ratio to the floor")
    assert text.count("Commit abc, 2026-11-22, H200, 16 cores, vLLM 0.26: `bench`") == 1


def test_engines_of_two_gpus_have_a_table_each(monkeypatch: pytest.MonkeyPatch) -> None:
    machine: dict[str, object] = {"commit": "abc", "date": "2026-11-22T10:00", "gpu": "H200, 1"}
    machine |= {"vllm": "0.26", "cpus": 32, "command": "bench"}
    document = {"machines": [machine]}
    monkeypatch.setattr(page, "read", lambda name: document if "stages" in name else None)
    monkeypatch.setattr(page.chats_report, "later", lambda document, words: f"table of {words}")
    text = page.chats_on_two()
    assert text.startswith("table of two GPUs, two pipeline stages\n\nCommit abc")
    monkeypatch.setattr(page, "read", lambda name: None)
    assert page.chats_on_two() == "not measured"
