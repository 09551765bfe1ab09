"""The published trace: its digest, the sides that are replayed, and the table made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.simulate import measure, page, public, sides, trace
from scripts.simulate.workloads import generate

DOCUMENT = page.read(public.RESULTS)


def test_another_trace_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace.write(path, generate("chat", seconds=30))
    with pytest.raises(ValueError, match="expected the conversation trace .*; python scripts"):
        public.checked(path)


def test_the_results_have_every_side_and_size_of_the_trace() -> None:
    rows = DOCUMENT["rows"]
    assert {(row["side"], row["cpu_blocks"]) for row in rows} == {
        (side, blocks) for side in public.SIDES for blocks in public.TIERS
    }
    assert {row["requests"] for row in rows} == {12_031}
    assert DOCUMENT["model"] == public.MACHINE._asdict()


def test_a_replay_has_the_figures_of_the_results(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    requests = generate("documents", seconds=60)
    trace.write(path, requests)
    rows = {side: public.replayed((str(path), side, 300)) for side in ("lru", sides.OPTIMUM)}
    for side, row in rows.items():
        assert set(row) == set(next(r for r in DOCUMENT["rows"] if r["side"] == side))
    assert rows["lru"]["cpu_blocks"] == 300 and rows["lru"]["requests"] == len(requests)
    assert rows["lru"]["hits"] <= rows[sides.OPTIMUM]["hits"]
    assert set(rows["lru"]) - {"cpu_blocks"} < set(measure.replayed(("chat", "lru", 0, 30.0)))


def test_the_table_is_beside_lru_with_the_same_tier() -> None:
    rows = [
        {"side": side, "cpu_blocks": blocks, "again": (1000 if side == "lru" else 900) * (n + 1)}
        for side in public.SIDES
        for n, blocks in enumerate(public.TIERS)
    ]
    machine = {"commit": "abc", "date": "2026-11-23T10:00"}
    made = public.page({"machine": machine, "model": {"block_tokens": 512}, "rows": rows})
    (line,) = (one for one in made.splitlines() if one.startswith("| this tier, eager, ARC "))
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    assert cells == ["461 (-10.0 %)", "922 (-10.0 %)"]
