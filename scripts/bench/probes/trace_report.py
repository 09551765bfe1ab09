"""The tables of a trace, for people and for the pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scripts.bench.common import table
from scripts.bench.probes.recorder import HOST
from scripts.bench.probes.trace_events import PHASES
from scripts.bench.probes.trace_figures import FIRST, FLOOR, GAP, LONGEST, METRICS, ON, SHARES

PARTS = tuple(f"p{share}" for share in SHARES)
WORDS = {GAP: "per output token", LONGEST: "longest step of a period"}
LOADED = "blocks loaded for a request, mean"
ALONE = "the cost is what the six steps up to the third one behind it take beyond six of decodes"
# Quantiles of a metric that say something with some hundred requests, or some ten periods.
SHOWN = {FIRST: PARTS, GAP: ("p50", "p99"), LONGEST: ("p50",)}


def page(document: dict[str, Any]) -> str:
    """What each variant took, and what switching off changed."""
    figures = document["figures"]
    parts = ["p50 / p90 / p99, ms:", _variants(figures)]
    if figures["changes"]:
        parts.append(changes(document))
    if figures["steps"]:
        parts += ["Steps, ms:", _steps(figures)]
    return "\n\n".join([*parts, *joins(document)])


def joins(document: dict[str, Any]) -> list[str]:
    """What joins cost the others, and where the host's time goes; traces of old have neither."""
    figures, parts = document["figures"], list[str]()
    if alone := figures.get("alone"):
        parts += [f"Requests that join alone, ms, medians ({ALONE}):", _alone(alone)]
    if host := _host(figures):
        parts += ["What the engine's thread does for a step, ms, p50 / p90:", table(host)]
    return parts


def changes(document: dict[str, Any]) -> str:
    """What switching off changed."""
    figures = document["figures"]
    title = (
        "Switched off less on, ms (99 % interval by a bootstrap over "
        f"{figures['cycles']} cycles; bold: 0 is outside):"
    )
    return f"{title}\n\n{_changes(figures)}"


def switched(document: dict[str, Any], metrics: Sequence[str]) -> str:
    """Some metrics of a trace in which one mechanism was switched, a row for each quantile."""
    figures = document["figures"]
    [(name, changed)] = figures["changes"].items()
    on, off = (figures["variants"][variant] for variant in (ON, name))
    rows = [[f"ms, {figures['cycles']} times each", "all on", _title(name), "off less on"]]
    for metric in metrics:
        for part in SHOWN.get(metric, ("p50",)):
            values = [_number(side["metrics"][metric][part]) for side in (on, off)]
            title = f"{WORDS.get(metric, metric)}, {part}"
            rows.append([title, *values, _change(changed[metric][part])])
    for what, key in (("requests", "requests"), (LOADED, "blocks")):
        rows.append([what, f"{on[key]:.0f}", f"{off[key]:.0f}", ""])
    return table(rows)


def bound(document: dict[str, Any]) -> str:
    """What an ideal tier would take, beside what was measured."""
    found = document["figures"]["bound"]
    if found is None:
        return "not measured"
    names = (*PARTS, "largest")
    rows = [["first token in the engine, ms", *names]]
    rows += [[name, *(_number(row[q]) for q in names)] for name, row in found["rows"].items()]
    measured, floor = found["rows"]["measured"], found["rows"]["floor"]
    rows.append(["measured, of the floor", *(f"{measured[q] / floor[q]:.2f}" for q in names)])
    bus = f"A block takes the bus {found['ms_per_block']:.4f} ms ({found['gb_per_s']:.1f} GB/s)."
    return f"{table(rows)}\n\n{bus}"


def slowest(document: dict[str, Any]) -> str:
    """Where the slowest requests spent their time, and all."""
    found = document["figures"]["bound"]
    if found is None:
        return "not measured"
    few = found["slowest"]
    rows = [["mean, ms", f"the slowest {few['requests']} requests", "all"]]
    rows += [[n, _number(v), _number(few["all"][n])] for n, v in few["slowest"].items()]
    return table(rows)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"


def _variants(figures: dict[str, Any]) -> str:
    names = list(figures["variants"])
    order = [n for n in (ON, FLOOR) if n in names] + [n for n in names if n not in (ON, FLOOR)]
    rows = [["", *(_title(name) for name in order)]]
    for metric in METRICS:
        found = [figures["variants"][name]["metrics"].get(metric) for name in order]
        cells = [" / ".join(_number(q[p]) for p in PARTS) if q else "-" for q in found]
        rows.append([WORDS.get(metric, metric), *cells])
    for what, key in (("requests", "requests"), ("left out", "left_out"), (LOADED, "blocks")):
        found = [figures["variants"][name].get(key) for name in order]  # traces of old lack blocks
        if None not in found:
            rows.append([what, *(f"{value:.0f}" for value in found)])
    return table(rows)


def _title(name: str) -> str:
    known = {ON: "all on", FLOOR: "floor", "nothing": "without nothing (control)"}
    return known.get(name, f"without {name}")


def _changes(figures: dict[str, Any]) -> str:
    columns = [(metric, part) for metric in METRICS for part in SHOWN.get(metric, ("p50",))]
    rows = [["", *(f"{WORDS.get(metric, metric)}, {part}" for metric, part in columns)]]
    for name, found in figures["changes"].items():
        cells = [_change(found[m][part]) if m in found else "-" for m, part in columns]
        rows.append([_title(name), *cells])
    return table(rows)


def _change(found: dict[str, Any]) -> str:
    if found["interval"] is None:
        return f"{found['change']:+.2f}"
    low, high = found["interval"]
    text = f"{found['change']:+.2f} ({low:+.2f} to {high:+.2f})"
    return f"**{text}**" if low > 0 or high < 0 else text


def _steps(figures: dict[str, Any]) -> str:
    rows = [["", "steps", "took p50", "p90", "p99", "waited for copies p50", "p99", "computed p50"]]
    for variant, kinds in figures["steps"].items():
        for kind, found in kinds.items():
            took, held, ran = (found.get(key) for key in ("took", "held", "ran"))
            row = [f"{_title(variant)}: {kind}", str(found["steps"])]
            row += [_number(took[part]) for part in PARTS]
            row += (
                [_number(held["p50"]), _number(held["p99"]), _number(ran["p50"])]
                if held
                else 3 * ["-"]
            )
            rows.append(row)  # fmt: skip
    return table(rows)


def _alone(rows: list[dict[str, Any]]) -> str:
    found = [["", "requests", "cost", "mean cost", "first token", "launches"]]
    for row in rows:
        ahead = row["steps_ahead"]
        begun = "" if ahead is None else f", steps from its load's begin: {ahead}"
        values = [row[name] for name in ("cost", "cost_mean", "first", "launches")]
        cells = ["-" if value is None else _number(value) for value in values]
        found.append([f"{_title(row['variant'])}{begun}", str(row["joins"]), *cells])
    return table(found)


def _host(figures: dict[str, Any]) -> list[list[str]]:
    """None where a trace has none: those of earlier commits."""
    rows = []
    for variant, kinds in figures["steps"].items():
        for kind, host in ((kind, found.get("host")) for kind, found in kinds.items()):
            if host:
                cells = [host.get(part) for part in HOST]
                texts = [f"{c['p50']:.2f} / {c['p90']:.2f}" if c else "-" for c in cells]
                rows.append([f"{_title(variant)}: {kind}", *texts])
    return [["", *HOST], *rows] if rows else []


EXPLAINED = (
    "All times are in the engine's process: the first token from a request's arrival there, "
    f"through {', '.join(f'*{phase}*' for phase in PHASES)} (below 0: it joined before its load "
    "was over). The floor is the same engine with the tier paused and prompts whose prefixes the "
    "GPU holds. Requests that computed again what was asked before are left out."
)
