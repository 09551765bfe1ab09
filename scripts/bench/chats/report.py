"""Tables and verdicts of `bench chats`, from the document that it writes."""

from __future__ import annotations

from typing import Any

from scripts.bench.chats import bound, figures
from scripts.bench.chats.figures import Figure, Shown, shown
from scripts.bench.chats.server import FLOOR
from scripts.bench.common import digits, table, verdict

NAMES = {
    FLOOR: "floor",
    "off": "no tier",
    "ours": "this tier",
    "simple": "SimpleCPUOffloadConnector",
    "offloading": "OffloadingConnector",
    "lmcache": "LMCache",
}


def modes_of(document: dict[str, Any]) -> list[str]:
    """The modes that gave something: those of `NAMES` first, in its order."""
    found = dict.fromkeys(job["mode"] for job in document["jobs"] if job["results"])
    known = [mode for mode in NAMES if mode in found]
    return [*known, *(mode for mode in found if mode not in NAMES)]


def name_of(mode: str) -> str:
    """What a mode is called in tables; one that has variables, with these."""
    name, *variables = mode.split("+")
    return ", ".join([NAMES.get(name, name), *variables])


def tables(document: dict[str, Any]) -> str:
    """One table for each load: turns that come back, first turns, prompts one at a time."""
    parts = [
        chosen(document, about(document), figures.LATER),
        chosen(document, "the same chats, first turns: nothing to find", figures.FIRST),
        chosen(document, "one prompt at a time, p50", [*figures.QUIET, *figures.AFTER]),
    ]
    return "\n\n".join(part for part in parts if part)


def later(document: dict[str, Any], words: str) -> str:
    """The table of turns that come back alone, and what it is a table of."""
    return chosen(document, f"{words}: {about(document)}", figures.LATER)


def about(document: dict[str, Any]) -> str:
    """The load of the chats in a few words; of the last job, if jobs differ."""
    load = document["jobs"][-1]["load"]
    return (
        f"{load['chats']} chats, {load['history_min']} to {load['history_max']} tokens of history, "
        f"{load['new_min']} to {load['new_max']} new ones a turn, {load['at_once']} at a time"
    )


def chosen(document: dict[str, Any], title: str, rows_of: list[Figure]) -> str:
    """A table of some figures by mode; empty where none of them was measured."""
    modes = modes_of(document)
    rows = [[title, *map(name_of, modes)]]
    for figure in rows_of:
        cells = [_cell(shown(document["jobs"], figure, mode)) for mode in modes]
        if set(cells) - {"-"}:
            rows.append([figure.title, *cells])
    return table(rows) if len(rows) > 1 else ""


def _cell(found: Shown | None) -> str:
    """The median, and in brackets its ratio to the floor, smallest and largest of several jobs."""
    if found is None:
        return "-"
    more = []
    if found.ratio is not None:
        more.append(f"{'' if found.paired else '~'}{found.ratio:.2f}")
    if len(found.values) > 1:
        more.append(f"{digits(min(found.values))} to {digits(max(found.values))}")
    return digits(found.median) + (f" ({'; '.join(more)})" if more else "")


EXPLAINED = (
    "In brackets the ratio to the floor of the same run (~: of another run), "
    "and the smallest and the largest of several servers."
)


def text(document: dict[str, Any]) -> str:
    """Tables, failures, verdicts."""
    if not modes_of(document):
        return "\n".join(["Nothing was measured.", *_failures(document)])
    starts = [
        f"{job['mode']} round {job['round']}: {job['start_s']:.1f} s"
        for job in document["jobs"]
        if job["start_s"] is not None
    ]
    lines = [tables(document), "", EXPLAINED, "", bound.table_of(document), ""]
    lines += ["Starts: " + ", ".join(starts), ""]
    return "\n".join([*lines, *_failures(document), "Targets (ours):", *verdicts(document)])


def _failures(document: dict[str, Any]) -> list[str]:
    return [
        f"{job['mode']}, round {job['round']}: {job['error']}"
        for job in document["jobs"]
        if job["error"]
    ]


def verdicts(document: dict[str, Any]) -> list[str]:
    """What the tier is to reach, beside the floor and beside the better connector."""
    later = {figure.title.partition(": ")[2]: figure for figure in figures.LATER}
    limits = {
        "first token, p50, ms": 1.2,
        "first token, p99, ms": 1.3,
        "first token, largest, ms": 2.0,
        "per output token, p50, ms": 1.02,
    }
    jobs = document["jobs"]
    lines = [
        verdict(f"later turns, {name}, over the floor", _ratio(jobs, later[name]), limit)
        for name, limit in limits.items()
    ]
    speed = _ratio(jobs, later["tokens answered a second"])
    lines.append(verdict("later turns, tokens a second over the floor", speed, 0.98, most=False))
    for name in ("first token, p50, ms", "first token, p99, ms"):
        value = _over_connectors(jobs, later[name])
        lines.append(verdict(f"later turns, {name}, over the better connector", value, 0.85))
    for when, chosen in (("quiet", figures.QUIET), ("after the chats", figures.AFTER)):
        value = _ratio(jobs, chosen[3])
        lines.append(verdict(f"{when}, decode steps behind a hit, over the floor", value, 1.03))
    return lines


def _ratio(jobs: list[dict[str, Any]], figure: Figure) -> float | None:
    found = shown(jobs, figure, "ours")
    return found.ratio if found else None


def _over_connectors(jobs: list[dict[str, Any]], figure: Figure) -> float | None:
    ours = shown(jobs, figure, "ours")
    others = [shown(jobs, figure, mode) for mode in ("simple", "offloading", "lmcache")]
    medians = [other.median for other in others if other]
    return ours.median / min(medians) if ours and medians else None
