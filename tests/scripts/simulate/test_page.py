"""docs/policies.md shows what the results say, and the default is nowhere worse than LRU."""

from __future__ import annotations

import pytest

from kvoffload_patch.config import Settings
from scripts.simulate import page
from scripts.simulate.measure import replayed
from scripts.simulate.sides import OPTIMUM, SIDES
from scripts.simulate.workloads import WORKLOADS

DOCUMENT = page.read()
STORE, EVICTION = Settings().store, Settings().eviction
DEFAULT = EVICTION if STORE == "eager" else f"{STORE}-{EVICTION}"
CONNECTORS = ("simple", "simple-lazy", "offloading", "offloading-arc")


def test_the_tables_are_those_of_the_results() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text, DOCUMENT) == text
    assert page.filled(text.replace("| optimum", "| the best", 1), DOCUMENT) == text
    for name in page.TABLES:
        assert text.count(f"<!-- table: {name} -->") == text.count(f"<!-- end: {name} -->") == 1


def test_every_side_was_replayed_on_every_trace_with_three_seeds() -> None:
    found = {(row["trace"], row["side"], row["seed"]) for row in DOCUMENT["rows"]}
    sides = (*SIDES, OPTIMUM)
    assert found == {(t, side, seed) for t in WORKLOADS for side in sides for seed in range(3)}


@pytest.mark.parametrize("trace", WORKLOADS)
def test_the_default_is_as_good_as_lru_auto_better_than_connectors_none_than_the_optimum(
    trace: str,
) -> None:
    again = {side: page.again(DOCUMENT, trace, side) for side in SIDES}
    assert sum(again[DEFAULT]) <= sum(again["lru"])
    for nth, ours in enumerate(again[DEFAULT]):
        assert ours <= 1.02 * again["lru"][nth], "with every seed, or nearly"
        for connector in CONNECTORS:
            assert ours < again[connector][nth] or not ours
    for side in SIDES:
        hits = page.mean(DOCUMENT, trace, side, "hits")
        assert hits <= page.mean(DOCUMENT, trace, OPTIMUM, "hits")


@pytest.mark.parametrize("trace", ["scan", "mix", "phases"])
def test_the_default_is_clearly_better_under_scans_and_changes_of_phase(trace: str) -> None:
    ours, base = (page.again(DOCUMENT, trace, side) for side in (DEFAULT, "lru"))
    assert all(one <= 0.9 * other for one, other in zip(ours, base)), "with every seed"


def test_hardly_any_block_of_the_tier_is_worth_nothing() -> None:
    rows = [row for row in DOCUMENT["rows"] if row["side"] not in (OPTIMUM, *CONNECTORS)]
    eager = [row["orphans"] for row in rows if not row["side"].startswith(("auto", "lazy"))]
    assert max(eager) < 0.001 and max(row["orphans"] for row in rows) < 0.01


def test_the_default_keeps_what_takes_the_place_of_what_was_used_often() -> None:
    assert page.mean(DOCUMENT, "takeover", DEFAULT, "again") == 0
    assert page.mean(DOCUMENT, "takeover", "arc", "again") > 1000


def test_where_lru_recomputes_nothing_tokens_are_given_and_no_ratio() -> None:
    rows = [
        {"trace": "chat", "side": side, "seed": seed, "again": number}
        for side, numbers in (("lru", (0, 4)), ("arc", (30, 10)), ("adaptive", (0, 0)))
        for seed, number in enumerate(numbers)
    ]
    document = {"rows": rows, "model": {"block_tokens": 512}}
    assert page._cell(document, "chat", "arc") == "10 k (5 to 15)"
    assert page._cell(document, "chat", "adaptive") == "0 k (0 to 0)"


def test_a_replay_has_the_figures_of_the_page() -> None:
    row = replayed(("documents", DEFAULT, 0, 60.0))
    assert set(row) == set(next(r for r in DOCUMENT["rows"] if r["side"] == DEFAULT))
    best = replayed(("documents", OPTIMUM, 0, 60.0))
    assert row["hits"] <= best["hits"] <= best["reusable"]


def test_the_table_of_the_default_says_what_the_results_do() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert not any(page.again(DOCUMENT, "takeover", DEFAULT)), "the table leaves it out"
    for side in ("lru", "adaptive"):
        low, high, least, most = beside(side, "again")
        words = (
            f"| recomputed, beside `eager` with `{side}` | {-high:.0f} to {-low:.0f} % less | from"
        )
        assert f"{words} {most:.1f} % more" in text and f"to {-least:.0f} % less |" in text
    low, high, _, most = beside("adaptive", "first_token_mean")
    assert f"| {-high:.0f} to {-low:.0f} % earlier | {most:.0f} % later with one seed" in text
    low, high, _, _ = beside("adaptive", "stored")
    assert f"| {1 + low / 100:.1f} to {1 + high / 100:.1f} times as many |" in text


def beside(side: str, figure: str) -> tuple[float, float, float, float]:
    """How far the default is from another side, in percent: means and single seeds, each from to.

    Over all traces on which anything is recomputed.
    """
    rows = {(r["trace"], r["side"], r["seed"]): r[figure] for r in DOCUMENT["rows"] if figure in r}
    means, seeds = [], []
    for trace in WORKLOADS:
        if trace != "takeover":
            pairs = [(rows[trace, DEFAULT, n], rows[trace, side, n]) for n in range(3)]
            means.append(100 * sum(a for a, _ in pairs) / sum(b for _, b in pairs) - 100)
            seeds += [100 * a / b - 100 for a, b in pairs]
    return min(means), max(means), min(seeds), max(seeds)
