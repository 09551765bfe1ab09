"""Writes the tables and the picture of docs/policies.md from what `measure` has written.

With --check nothing is written, and status 1 says that the page is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.bench.common import GIB, pyplot, say, table
from scripts.simulate import growth, heads, loads, public, scale
from scripts.simulate.sides import OPTIMUM, SIDES
from scripts.simulate.spread import by_seed, change
from scripts.simulate.workloads import WORKLOADS

RESULTS = ROOT / "docs" / "measured" / "policies.json"
UNSEEN = ROOT / "docs" / "measured" / "policies-unseen.json"
PAGE = ROOT / "docs" / "policies.md"
PICTURE = ROOT / "docs" / "policies.png"
BASE = "lru"
COLUMNS = (
    "hit rate, %", "of it tier, %", "recomputed, k tokens", "beside LRU", "stored, GiB",
    "loaded, GiB", "orphans, %", "first token, mean s", "p95 s",
)  # fmt: skip


def read(path: Path = RESULTS) -> dict[str, Any]:
    """The results."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def mean(document: dict[str, Any], trace: str, side: str, figure: str) -> float:
    """The mean over the seeds."""
    rows = [r for r in document["rows"] if (r["trace"], r["side"]) == (trace, side)]
    return statistics.fmean(row[figure] for row in rows)


def again(document: dict[str, Any], trace: str, side: str) -> list[float]:
    """Blocks recomputed, of each seed."""
    rows = [r for r in document["rows"] if (r["trace"], r["side"]) == (trace, side)]
    return by_seed(rows, "again")


def _cell(document: dict[str, Any], trace: str, side: str) -> str:
    """Tokens recomputed beside LRU; where that recomputes none with a seed, thousands of them."""
    ours, base = again(document, trace, side), again(document, trace, BASE)
    if all(base):
        return change(ours, base)
    thousands = [one * document["model"]["block_tokens"] / 1000 for one in ours]
    whole = f"{statistics.fmean(thousands):,.0f} k"
    return f"{whole} ({min(thousands):,.0f} to {max(thousands):,.0f})"


def traces(document: dict[str, Any]) -> str:
    """A table for each trace."""
    return "\n\n".join(_trace(document, name) for name in WORKLOADS)


def _trace(document: dict[str, Any], name: str) -> str:
    requests = mean(document, name, BASE, "requests")
    head = f"**{name}**: {WORKLOADS[name][0]}; {requests:,.0f} requests"
    rows = [["", *COLUMNS], *(_row(document, name, side) for side in (*SIDES, OPTIMUM))]
    return f"{head}\n\n{table(rows)}"


def _row(document: dict[str, Any], trace: str, side: str) -> list[str]:
    model = document["model"]
    gib = model["block_tokens"] * model["token_bytes"] / GIB

    def of(figure: str) -> float:
        return mean(document, trace, side, figure)

    known = [f"{100 * of('hits') / of('reusable'):.1f}"]
    tokens = f"{of('again') * model['block_tokens'] / 1000:,.0f}"
    more = _cell(document, trace, side)
    if side == OPTIMUM:
        return [OPTIMUM, *known, "-", tokens, more, *["-"] * 5]
    return [
        SIDES[side].words, *known, f"{100 * of('hits_tier') / of('reusable'):.1f}", tokens, more,
        f"{of('stored') * gib:,.0f}", f"{of('loaded') * gib:,.0f}", f"{100 * of('orphans'):.1f}",
        f"{of('first_token_mean'):.2f}", f"{of('first_token_p95'):.2f}",
    ]  # fmt: skip


def short(document: dict[str, Any]) -> str:
    """Tokens recomputed beside LRU, every side and trace."""
    found = {row["side"] for row in document["rows"]} - {BASE, "none"}
    sides = [side for side in (*SIDES, OPTIMUM) if side in found]
    rows = [
        ["tokens recomputed, beside this tier, eager, LRU (least and most of a seed)", *WORKLOADS]
    ]
    for side in sides:
        words = OPTIMUM if side == OPTIMUM else SIDES[side].words
        rows.append([words, *(_cell(document, t, side) for t in WORKLOADS)])
    return table(rows)


def made(document: dict[str, Any]) -> str:
    """What the replays ran as."""
    machine, model = document["machine"], document["model"]
    kept = ", ".join(f"{name} {value}" for name, value in model.items())
    return (
        f"Commit {machine['commit']}, {machine['date'][:10]}: `{machine['command']}`, traces of "
        f"{document['seconds']:.0f} s, three seeds; figures without a range are means. "
        f"The model: {kept}."
    )


def while_growing(document: dict[str, Any]) -> str:
    """What the first engine on a machine recomputes; it has a result of its own."""
    return growth.page(read(growth.RESULTS))


def of_heads(document: dict[str, Any]) -> str:
    """What is found on the GPU that keeps heads of prefixes; it has a result of its own."""
    return heads.page(read(heads.RESULTS))


def sizes(document: dict[str, Any]) -> str:
    """What a block costs in tiers of several sizes; it has a result of its own."""
    return scale.page(read(scale.RESULTS))


def unseen(document: dict[str, Any]) -> str:
    """The same as `short`, of seeds that no number was chosen on."""
    return short(read(UNSEEN))


def published(document: dict[str, Any]) -> str:
    """Each side on a trace that is not in this tree; it has a result of its own."""
    return public.page(read(public.RESULTS))


def recompute(document: dict[str, Any]) -> str:
    """A prefix computed where its load takes longer, at each speed of the bus."""
    return _question("recompute", "GB/s each way")


def ahead(document: dict[str, Any]) -> str:
    """Loads that begin before there is a run slot, with each number of slots."""
    return _question("ahead", "run slots")


def _question(name: str, varied: str) -> str:
    rows = [r for r in read(loads.RESULTS)["rows"] if r["question"] == name]
    title = f"first token, mean s, without and with (least and most of a seed); {varied}"
    lines = [[title, *loads.TRACES]]
    for value in dict.fromkeys(row["varied"] for row in rows):
        line = [f"{value:g}"]
        for trace in loads.TRACES:
            these = [r for r in rows if (r["varied"], r["trace"]) == (value, trace)]
            these.sort(key=lambda row: row["seed"])
            off, on = ([row[side]["first_token_mean"] for row in these] for side in ("off", "on"))
            means = f"{statistics.fmean(off):.2f}, {statistics.fmean(on):.2f}"
            line.append(f"{means}: {change(on, off)}")
        lines.append(line)
    return table(lines)


TABLES = {
    "short": short,
    "unseen": unseen,
    "public": published,
    "growth": while_growing,
    "heads": of_heads,
    "scale": sizes,
    "recompute": recompute,
    "ahead": ahead,
    "traces": traces,
    "made": made,
}


def filled(text: str, document: dict[str, Any]) -> str:
    """The page with its tables made from the results."""
    for name, make in TABLES.items():
        begin, end = f"<!-- table: {name} -->", f"<!-- end: {name} -->"
        content = f"{begin}\n{make(document)}\n{end}"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        text = re.sub(pattern, content.replace("\\", r"\\"), text, flags=re.S)
    return text


def draw(document: dict[str, Any]) -> None:
    """Tokens recomputed on each trace, by side."""
    plt = pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    sides = [side for side in (*SIDES, OPTIMUM) if side != "none"]
    width, colours = 0.85 / len(sides), plt.get_cmap("tab20")  # one for each
    for number, side in enumerate(sides):
        places = [group - 0.425 + width * (number + 0.5) for group in range(len(WORKLOADS))]
        heights = [
            100 * mean(document, t, side, "again") / mean(document, t, side, "reusable")
            for t in WORKLOADS
        ]
        words = OPTIMUM if side == OPTIMUM else SIDES[side].words
        axes.bar(places, heights, width * 0.95, label=words, color=colours(number))
    axes.set_xticks(range(len(WORKLOADS)), WORKLOADS)
    axes.set_ylabel("recomputed, % of what could be found")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(PICTURE, dpi=120)
    plt.close(figure)


def main() -> int:
    """Write the page, or say whether it is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1: not right")
    options = parser.parse_args()
    text, document = PAGE.read_text(encoding="utf-8"), read()
    right = filled(text, document)
    if options.check:
        say("as the results say" if right == text else "not what the results say")
        return int(right != text)
    PAGE.write_text(right, encoding="utf-8")
    draw(document)
    return 0
