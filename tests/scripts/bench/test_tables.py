"""Tables of the pages of figures, from results that are made up."""

from __future__ import annotations

import pytest

from scripts.bench import step as bench_step
from scripts.bench import tables
from scripts.bench.common import cell


def test_a_cell_has_median_smallest_and_largest() -> None:
    assert cell([0.0301, 0.02, 0.04], 1000) == "30.1 (20 to 40)"
    assert cell([]) == "-"


def test_conversations_have_a_table_once_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "read", lambda name: None)
    assert tables.chats() == "not measured"
    machine: dict[str, object] = {"commit": "abc", "date": "2026-11-22T10:00", "gpu": "H200, 1"}
    machine |= {"vllm": "0.26", "cpus": 16, "command": "bench"}
    monkeypatch.setattr(tables, "read", lambda name: {"machines": [machine, machine]})
    monkeypatch.setattr(tables.chats_report, "tables", lambda document: "the tables")
    text = tables.chats()
    assert text.startswith("the tables\n\nIn brackets the ratio to the floor")
    assert text.count("Commit abc, 2026-11-22, H200, 16 cores, vLLM 0.26: `bench`") == 1


def test_what_enqueuing_costs_is_told_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    machine: dict[str, object] = {"date": "2026-11-22T10:00", "gpu": "H200, 1", "vllm": "0.26"}
    machine |= {"cpus": 32, "command": "bench"}

    def read(name: str) -> dict[str, object]:
        commit, ms = ("abc", 3.0) if "old" in name else ("def", 1.0)
        row = {"case": "load", "host_ms": [ms, 2 * ms], "device_ms": [9.0]}
        return {"machines": [{**machine, "commit": commit}], "rows": [row]}

    monkeypatch.setattr(tables, "read", read)
    monkeypatch.setattr(tables.chats_report, "later", lambda document, words: f"table of {words}")
    lines = tables.enqueued().splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[2:-1]] == [
        "host, abc", "host, def", "device, abc", "device, def",
    ]  # fmt: skip
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == [
        "load", "4.5 (3 to 6)", "1.5 (1 to 2)", "9 (9 to 9)", "9 (9 to 9)",
    ]  # fmt: skip
    assert "table of two servers at the same time, each on a GPU of one host" in lines
    monkeypatch.setattr(tables, "read", lambda name: None)
    assert tables.enqueued() == "not measured"


def test_chats_that_ran_otherwise_have_a_table_each(monkeypatch: pytest.MonkeyPatch) -> None:
    machine: dict[str, object] = {"commit": "abc", "date": "2026-11-22T10:00", "gpu": "H200, 1"}
    machine |= {"vllm": "0.26", "cpus": 32, "command": "bench"}
    document = {"machines": [machine]}
    monkeypatch.setattr(tables, "read", lambda name: document if "pair" in name else None)
    monkeypatch.setattr(tables.chats_report, "later", lambda document, words: f"table of {words}")
    text = tables.other_chats()
    assert text.startswith("table of the same, no prompts before them\n\nCommit abc")
    monkeypatch.setattr(tables, "read", lambda name: None)
    assert tables.other_chats() == "not measured"


def test_the_page_has_the_rows_and_systems_of_conversations_that_say_most() -> None:
    whole, few = _table(tables.chats()), _table(tables.conversations())
    systems = next(iter(few.values()))
    assert systems and not [name for name in systems if "KVOFFLOAD_" in name]
    assert [*few][1:] == [*tables.CONVERSATIONS]
    for title in tables.CONVERSATIONS:
        assert few[title] == whole[title][: len(systems)]


def _table(text: str) -> dict[str, list[str]]:
    """Cells of each row of a page's tables, by the first one; dashes between are left out."""
    lines = [line for line in text.splitlines() if "|" in line and "|--" not in line]
    return {line.split("|")[1].strip(): _cells(line) for line in lines}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_bigger_models_blocks_are_shown_as_the_tiers_own_backend_copies_them() -> None:
    rows = [title for title in _table(tables.shapes()) if title.startswith("staged")]
    assert {kind for title in rows for kind in ("mla", "two_heads", "fp8") if kind in title} == {
        "mla", "two_heads", "fp8"
    }  # fmt: skip
    assert "torch," not in tables.shapes()


def test_goals_of_the_step_are_beside_what_each_scheduler_adds() -> None:
    sides = {"tier": {"added": 59.94, "added_a_block": 3.7}, "simple": {"added": 1215.2}}
    rows = [{"name": "a", "title": "decodes", "sides": sides}, {"name": "c", "sides": {}}]
    made = bench_step.goals(rows).splitlines()
    assert [cell.strip() for cell in made[0].split("|")[1:4]] == [
        "added, µs",
        "goal of the tier",
        "tier",
    ]
    assert [cell.strip() for cell in made[2].split("|")[1:-1]] == [
        "to a step: decodes", "60", "59.94", "1215",
    ]  # fmt: skip
    assert len(made) == 3


def test_servers_of_two_gpus_have_a_table_each(monkeypatch: pytest.MonkeyPatch) -> None:
    machine: dict[str, object] = {"commit": "abc", "date": "2026-11-27T10:00", "gpu": "H200, 1"}
    machine |= {"vllm": "0.26", "cpus": 64, "command": "bench"}
    document = {"machines": [machine]}
    monkeypatch.setattr(tables, "read", lambda name: document if "stages" in name else None)
    monkeypatch.setattr(tables.chats_report, "about", lambda document: "chats")
    monkeypatch.setattr(
        tables.chats_report, "chosen", lambda document, title, rows: f"{title}, {len(rows)} rows"
    )
    text = tables.ranks()
    assert text.startswith("two pipeline stages, 25 s later: chats; one prompt at a time, p50, ")
    assert "Commit abc, 2026-11-27, H200, 64 cores, vLLM 0.26: `bench`" in text
    monkeypatch.setattr(tables, "read", lambda name: None)
    assert tables.ranks() == "not measured"
