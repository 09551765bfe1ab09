"""The tables and verdicts of `bench chats`, from given results."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from scripts.bench.chats import figures, report
from scripts.bench.chats.load import Load


def turns(first: list[float], step: float, seconds: float = 2.0) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "prompt": [100] * len(first),
        "cached": [80] * len(first),
        "tokens": [11] * len(first),
        "first": first,
        "whole": [value + 10 * step for value in first],
        "gaps": {"p50": step, "p99": 2 * step, "largest": 3 * step},
    }


def singles(first: float, decode: float) -> dict[str, Any]:
    kinds = ["whole", "ragged", "extended", "decoded"] * 2
    behind = [decode if kind == "decoded" else 0.0 for kind in kinds]
    made = turns([first] * len(kinds), 1.0)
    return {**made, "kinds": kinds, "whole": [first + more for more in behind]}


def job(mode: str, run: str = "1", error: str = "", **results: Any) -> dict[str, Any]:
    made = {"mode": mode, "round": 1, "run": run, "results": results, "error": error}
    return {**made, "start_s": 60.0, "load": asdict(Load())}


def cells(text: str, row: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {row}")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


FLOOR = [float(n) for n in range(1, 101)]
OURS = [2.0 * n for n in FLOOR]


def test_a_table_has_each_mode_beside_the_floor() -> None:
    document = {
        "jobs": [job("ours", later=turns(OURS, 3.0)), job("floor", later=turns(FLOOR, 2.0))]
    }
    text = report.text(document)
    title = "72 chats, 4000 to 7000 tokens of history, 60 to 180 new ones a turn, 12 at a time"
    assert cells(text, title) == ["floor", "this tier"]
    assert cells(text, "later turns: first token, p50") == ["50", "100 (2.00)"]
    assert cells(text, "later turns: first token, p90") == ["90", "180 (2.00)"]
    assert cells(text, "later turns: first token, p99") == ["99", "198 (2.00)"]
    assert cells(text, "later turns: first token, largest") == ["100", "200 (2.00)"]
    assert cells(text, "later turns: per output token, p50") == ["2", "3 (1.50)"]
    assert cells(text, "later turns: between tokens, largest") == ["6", "9 (1.50)"]
    assert cells(text, "later turns: whole answer, p50") == ["70", "130 (1.86)"]
    assert cells(text, "later turns: tokens answered a second") == ["550", "550 (1.00)"]
    assert cells(text, "later turns: prompt tokens found") == ["80", "80"]
    assert "MISS  later turns, first token, p50, ms, over the floor: 2, at most 1.2" in text
    assert "MISS  later turns, per output token, p50, ms, over the floor: 1.5" in text
    assert "ok    later turns, tokens a second over the floor: 1, at least 0.98" in text
    assert "quiet" not in report.tables(document)


def test_single_prompts_by_kind() -> None:
    document = {
        "jobs": [job("floor", quiet=singles(20, 80), after=singles(20, 80)),
                 job("ours", quiet=singles(34, 80), after=singles(50, 100))]
    }  # fmt: skip
    text = report.text(document)
    for kind in ("ends on a block", "does not end on a block", "more tokens behind it"):
        assert cells(text, f"quiet: {kind}") == ["20", "34 (1.70)"]
        assert cells(text, f"after the chats: {kind}") == ["20", "50 (2.50)"]
    assert cells(text, "quiet: the decode steps") == ["80", "80 (1.00)"]
    assert "ok    quiet, decode steps behind a hit, over the floor: 1" in text
    assert "MISS  after the chats, decode steps behind a hit, over the floor: 1.25" in text


def test_a_ratio_is_of_one_run_where_the_floor_ran_in_it() -> None:
    first = figures.LATER[0]
    jobs = [job("floor", "a", later=turns([10.0], 1)), job("ours", "a", later=turns([20.0], 1)),
            job("floor", "b", later=turns([20.0], 1)), job("ours", "b", later=turns([30.0], 1)),
            job("simple", "c", later=turns([30.0], 1)), job("ours", "c")]  # fmt: skip
    ours, simple = figures.shown(jobs, first, "ours"), figures.shown(jobs, first, "simple")
    assert ours and ours.values == [20.0, 30.0] and ours.ratio == 1.75 and ours.paired
    assert simple and simple.ratio == 2.0 and not simple.paired
    text = report.text({"jobs": jobs})
    row = cells(text, "later turns: first token, p50")
    assert row == ["15 (10 to 20)", "25 (1.75; 20 to 30)", "30 (~2.00)"]
    assert "over the better connector: 0.833, at most 0.85" in text


def test_what_failed_is_said() -> None:
    failed = job("simple", error="start: no")
    assert "simple, round 1: start: no" in report.text({"jobs": [failed]})
    both = report.text({"jobs": [failed, job("floor", first=turns(FLOOR, 2.0))]})
    assert "simple, round 1: start: no" in both and cells(both, "first turns: first token, p50")
    assert "later turns" not in report.tables({"jobs": [job("floor", first=turns(FLOOR, 2.0))]})


def test_a_mode_with_variables_is_named_with_them() -> None:
    assert report.name_of("ours+KVOFFLOAD_STORE=auto") == "this tier, KVOFFLOAD_STORE=auto"
    assert report.name_of("simple") == "SimpleCPUOffloadConnector"
    assert report.name_of("other") == "other"
