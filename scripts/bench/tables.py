"""The tables of docs/performance.md, docs/measurements.md, docs/mechanisms.md and README.md.

Each is made from results in docs/measured/current, and says from which commit, machine and command.
"""

from __future__ import annotations

import importlib
import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from scripts.bench import step as bench_step
from scripts.bench.chats import bound as chats_bound
from scripts.bench.chats import figures as chats_figures
from scripts.bench.chats import report as chats_report
from scripts.bench.common import ROOT, cell, digits, ran, ran_on, table
from scripts.bench.probes import trace_report
from scripts.bench.serve import pressed
from scripts.bench.serve import report as serve
from scripts.bench.transfer import report as transfer_report

RESULTS = ROOT / "docs" / "measured" / "current"
MODES = {
    "off": "no tier",
    "ours": "this tier",
    "simple": "SimpleCPUOffloadConnector",
    "offloading": "OffloadingConnector",
}
BEFORE = " at d7e3e02"
# Figures of `bench serve` on the page: key, words, factor to the unit in the words.
SERVED = (
    ("s1", "S1: first token of 8,192 tokens in CPU memory, ms", 1000),
    ("s1again", "S1 again, which the GPU has then, ms", 1000),
    ("s3", "S3: 60 sessions of 8k tokens, the GPU holds 23; a turn of all, s", 1),
    ("s2", "S2: 200 fresh prompts of 2,048 tokens, nothing to find, s", 1),
    ("start", "engine start with the tier, s", 1),
)
# The rows of README.md, one number a cell.
SHORT = (
    ("s1", "first token of 8,192 tokens that are in CPU memory, ms", 1000),
    ("s3", "60 sessions of 8k tokens, the GPU holds 23; one turn of all, s", 1),
    ("s2", "200 fresh prompts of 2,048 tokens, nothing to find, s", 1),
)
# What loads by layer change, of the rows of `bench chats`.
BY_LAYER = (
    "later turns: first token, p50, ms",
    "later turns: first token, p90, ms",
    "later turns: first token, p99, ms",
    "later turns: first token, largest, ms",
    "later turns: per output token, p50, ms",
    "later turns: between tokens, largest, ms",
    "later turns: tokens answered a second",
    "quiet: ends on a block, first token, ms",
    "quiet: does not end on a block, first token, ms",
    "quiet: more tokens behind it, first token, ms",
)
# Turns that come back, of chats that ran otherwise than those of `chats`.
OTHER_CHATS = {
    "chats-h100.json": "two servers at a time on two H100s",
    "chats-swapped.json": "two servers at a time on two H200s, swapped between pairs",
    "chats-third.json": "two servers at a time on two H200s",
    "chats-second.json": "two servers at a time, blocks looked for at once",
    "chats-before.json": "one system after the other",
    "chats-stores.json": "whole loads, by when blocks are stored",
    "chats-alone.json": "without prompts before them",
    "chats-slow-loads.json": "by layer, loads slower than at the start",
    "chats-followed.json": "by layer, what loads take followed, two servers at a time",
    "chats-pair.json": "the same, no prompts before them",
    "chats-newest.json": "one system after the other, vLLM 0.33.0 on an H200",
    "chats-heads.json": "the same, vLLM 0.26.0, seven turns, heads of prefixes on the GPU",
    "chats-faster.json": "one system after the other, an H200 with a faster host",
    "chats-slower.json": "one system after the other, an H200 with a slower host",
    "chats-crowded.json": "more at a time, of more lengths, vLLM 0.26.0 on another H200",
    "chats-short.json": "short histories, six at a time",
    "chats-compared.json": "the same, fewer loads compared, a host with slow phases",
    "chats-sampled.json": "two servers at a time on two other H200s, one load in 256 compared",
}
# The same on two GPUs for each server, two servers at a time.
RANKS = {
    "chats-ranks.json": "two tensor-parallel ranks, while tiers grow",
    "chats-ranks-grown.json": "two tensor-parallel ranks, 25 s later",
    "chats-stages.json": "two pipeline stages, 25 s later",
}
# The rows of the page on conversations, as `bench chats` names them.
CONVERSATIONS = (
    "later turns: first token, p50, ms",
    "later turns: first token, p99, ms",
    "later turns: first token, largest, ms",
    "later turns: per output token, p50, ms",
    "later turns: tokens answered a second",
    "quiet: ends on a block, first token, ms",
    "quiet: does not end on a block, first token, ms",
    "quiet: the decode steps behind such a hit, ms",
)
MECHANISMS = {
    "mechanisms-short.json": "default graphs, 6 of 160 short sessions at a time, beside starts",
    "mechanisms-crowd.json": "Llama-3.2-1B's shape, 256 long answers at a time",
    "mechanisms-crowd-8b.json": "Llama-3.1-8B's shape, 256 long answers at a time",
    "mechanisms-heads.json": "eager prefill, 60 sessions in turns, then 12 at a time",
    "mechanisms-quiet.json": "eager prefill, one prompt at a time",
    "mechanisms-quiet-graphs.json": "default graphs, one prompt at a time",
    "mechanisms-turn.json": "default graphs, one prompt at a time after a turn of 60 sessions",
}
MECHANISMS_GONE = {
    "mechanisms-ahead.json": "default graphs, 12 sessions at a time, beside a second server",
    "mechanisms-arrivals.json": "default graphs, 14 sessions a second beside 12 decodes",
    "mechanisms-chats.json": "default graphs, 12 sessions at a time, each back at once",
    "mechanisms-default.json": "default graphs, 60 sessions in turns",
    "mechanisms-s3.json": "eager prefill, 60 sessions in turns",
}
PIECES = {
    "chats-pieces-v1.json": "two servers at a time, runner V1",
    "chats-pieces-v2.json": "the same, runner V2",
    "chats-pieces-floor.json": "beside the floor, runner V1",
}
HEADS = {"trace-heads.json": "eager prefill", "trace-heads-graphs.json": "default graphs"}
HEADS_METRICS = ("first token", "on the bus", "in its step", "a token")
PIECES_ROWS = {
    "later turns: first token, p50, ms",
    "later turns: per output token, p50, ms",
    "later turns: tokens answered a second",
    "later turns: a step of decodes, mean, ms",
    "later turns: the step before one that a request joins, ms",
    "later turns: a step that a request joins, ms",
}


def read(name: str) -> Any:
    """One result; None where it was not measured."""
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def _made(name: str, make: Callable[[Any], str]) -> str:
    """What is made of a result, and what it ran on."""
    return _each({name: ""}, lambda document, _: make(document))


def _each(names: dict[str, str], make: Callable[[Any, str], str]) -> str:
    """The same of several results, each with words of its own; of those that were measured."""
    parts = []
    for name, words in names.items():
        document = read(name)
        if document is not None:
            machines = document["machines"] if "machines" in document else [document["machine"]]
            parts += [make(document, words), *ran(*machines)]
    return "\n\n".join(parts) or "not measured"


def _served(document: dict[str, Any]) -> str:
    found = serve.figures(document)
    shown = [mode for mode in MODES if any(mode in by_mode for by_mode in found.values())]
    rows = [["median (smallest to largest)", *(MODES[mode] for mode in shown)]]
    for key, words, factor in SERVED:
        if not (by_mode := found.get(key)):
            continue
        samples = [by_mode.get(mode, {"samples": []})["samples"] for mode in shown]
        rows.append([words, *(cell(values, factor) for values in samples)])
    return table(rows)


def pairs() -> str:
    """S1 to S3 and the start beside the commit before, both at once on two GPUs of one host."""
    words = {"graphs": "default graphs", "eager": "eager prefill"}
    sides = [(graphs, side) for graphs in words for side in ("new", "old")]
    documents = [read(f"pair-{graphs}-{side}.json") for graphs, side in sides]
    if None in documents:
        return "not measured"
    rows = [["median (smallest to largest)"]]
    rows[0] += [f"{words[g]}, {MODES['ours']}{'' if s == 'new' else BEFORE}" for g, s in sides]
    for key, what, factor in SERVED:
        found = [serve.figures(document).get(key, {}) for document in documents]
        if not any(found):
            continue
        samples = [by_mode["ours"]["samples"] if by_mode else [] for by_mode in found]
        rows.append([what, *(cell(values, factor) for values in samples)])
    machines = [document["machines"][-1] for document in documents]
    return "\n\n".join([table(rows), *ran(*machines)])


def short() -> str | None:
    """The medians of `served` for README.md; None, which leaves the table, if not measured."""
    document = read("serve.json")
    if document is None:
        return None
    found = serve.figures(document)
    shown = [m for m in MODES if m in {mode for key, *_ in SHORT for mode in found.get(key, {})}]
    rows = [["median", *(MODES[mode] for mode in shown)]]
    for key, words, factor in SHORT:
        samples = [found.get(key, {}).get(mode, {"samples": []})["samples"] for mode in shown]
        rows.append([words, *(_middle(values, factor) for values in samples)])
    return f"{table(rows)}\n\n{ran_on(document['machines'][-1])}."


def _middle(values: list[float], factor: float) -> str:
    return digits(factor * statistics.median(values)) if values else "-"


def chats() -> str:
    """Conversations over HTTP, beside plain vLLM whose GPU cache holds everything."""
    return _made(
        "chats.json", lambda found: f"{chats_report.tables(found)}\n\n{chats_report.EXPLAINED}"
    )


def conversations() -> str:
    """The rows of `chats` that say most, of the systems as they come."""

    def make(document: dict[str, Any]) -> str:
        as_they_come = [job for job in document["jobs"] if "+" not in job["mode"]]
        return _conversations({**document, "jobs": as_they_come}, CONVERSATIONS)

    return _made("chats.json", make)


def bound_of_conversations() -> str | None:
    """Of the last pair of `conversations`, which says what it ran on."""
    document = read("chats.json")
    return document and chats_bound.table_of(document)


def _conversations(document: dict[str, Any], chosen: tuple[str, ...]) -> str:
    titles = {figure.title: figure for figure in (*chats_figures.LATER, *chats_figures.QUIET)}
    words = f"{chats_report.about(document)}; one prompt at a time"
    rows = chats_report.chosen(document, words, [titles[title] for title in chosen])
    return f"{rows}\n\n{chats_report.EXPLAINED}"


def by_layer() -> str:
    """What loads by layer change: conversations over HTTP, and by time in one engine."""
    served = _made("chats-by-layer.json", lambda found: _conversations(found, BY_LAYER))
    return f"{served}\n\n{_made('trace-by-layer.json', trace_report.changes)}"


def pieces() -> str:
    """What pieces of loads change, and which steps are longer than a floor's."""

    def make(document: dict[str, Any], words: str) -> str:
        title = f"{words}: {chats_report.about(document)}"
        chosen = [f for f in chats_figures.LATER if f.title in PIECES_ROWS]
        return chats_report.chosen(document, title, chosen)

    return _each(PIECES, make)


def other_chats() -> str:
    """Turns that come back: without other prompts before them, and on engines of two GPUs."""
    return _each(OTHER_CHATS, chats_report.later)


def mechanisms(runs: dict[str, str] = MECHANISMS) -> str:
    """What each mechanism is worth: all rounds of one engine, one switched off at a time."""
    return _each(runs, lambda found, words: f"{words}, ms:\n\n{_by_mechanism(found['rounds'])}")


def trace() -> str:
    """What switching a mechanism changes, by time in the engine."""
    return _made(
        "trace.json", lambda found: f"{trace_report.page(found)}\n\n{trace_report.EXPLAINED}"
    )


def joins(name: str = "trace-joins.json") -> str:
    """What a request that joins costs the others, and where the host's time goes."""
    return _made(name, lambda found: "\n\n".join(trace_report.joins(found)))


def heads() -> str:
    """What heads of prefixes on the GPU are worth, by time in one engine."""
    return _each(
        HEADS, lambda found, words: f"{words}:\n\n{trace_report.switched(found, HEADS_METRICS)}"
    )


def _by_mechanism(rounds: list[dict[str, Any]]) -> str:
    names = [name for name in rounds[0] if name not in ("without", "between tokens p50")]
    rows = [["switched off", *names]]
    for mechanism in dict.fromkeys(["nothing", *sorted(r["without"] for r in rounds)]):
        own = [r for r in rounds if r["without"] == mechanism]
        values = [[_flat(r[name]) for r in own] for name in names]
        rows.append([mechanism, *(cell(sum(found, [])) for found in values)])
    return table(rows)


def _flat(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]


def step() -> str:
    """What a scheduler step costs on the host, the connectors beside it."""
    return _made("step.json", bench_step.page)


def goals() -> str:
    """What a step may cost by the tier's goals, and what it costs."""
    return _made("step.json", lambda found: bench_step.goals(found["rows"]))


def transfer() -> str:
    """Shares of what plain copies of one pinned buffer reach."""
    return _made("../2026-11-22-transfer-f35c44a.json", transfer_report.page)


def shapes() -> str:
    """The same of bigger models' blocks, by the tier's own backend."""

    def make(document: dict[str, Any]) -> str:
        staged = [case for case in document["cases"] if case["backend"] == "staged"]
        return transfer_report.page({**document, "cases": staged})

    return _made("transfer-shapes.json", make)


def checksums() -> str:
    """How fast copies with checksums are beside copies without."""
    return _made("transfer-checksums.json", transfer_report.checksums)


def checksums_said() -> str:
    """The sentence below the table of `checksums`."""
    document = read("transfer-checksums.json")
    return "not measured" if document is None else transfer_report.checksums_said(document)


def pressure() -> str:
    """Chats that the GPU's cache cannot hold while they run."""
    return _made("pressure.json", lambda found: pressed.page(found["jobs"], MODES))


def answers_under_pressure(name: str) -> str:
    """The same on a small model, whose answers are compared."""
    return _made(name, lambda found: pressed.small_page(found["jobs"], MODES))


def ranks() -> str:
    """Conversations and single prompts on servers of two GPUs each."""
    rows = [*chats_figures.LATER, *chats_figures.QUIET, *chats_figures.AFTER]

    def make(document: dict[str, Any], words: str) -> str:
        title = f"{words}: {chats_report.about(document)}; one prompt at a time, p50"
        return chats_report.chosen(document, title, rows)

    return _each(RANKS, make)


def probed(name: str) -> str:
    """The table of a probe, as it makes it itself; imported here, as the others need no torch."""
    probe = f"scripts.bench.probes.{name.partition('-')[0]}"
    return _made(f"{name}.json", lambda found: importlib.import_module(probe).report(found["rows"]))


def enqueued() -> str:
    """What enqueuing copies costs the host, and chats on two servers at the same time."""
    sides, chats = (read("enqueue-old.json"), read("enqueue-new.json")), read("chats-enqueue.json")
    if None in (*sides, chats):
        return "not measured"
    commits = [side["machines"][-1]["commit"] for side in sides]
    head = [f"{what}, {commit}" for what in ("host", "device") for commit in commits]
    rows = [["ms, median (smallest to largest)", *head]]
    for pair in zip(*(side["rows"] for side in sides)):
        found = [one[what] for what in ("host_ms", "device_ms") for one in pair]
        rows.append([pair[0]["case"], *(cell(values) for values in found)])
    ran_sides, ran_chats = ran(*(one["machines"][-1] for one in sides)), ran(*chats["machines"])
    later = chats_report.later(chats, "two servers at the same time, each on a GPU of one host")
    return "\n\n".join([table(rows), *ran_sides, later, *ran_chats])


PROBED = ("modelled", "modelled-heads", "long", "long-eager", "beside", "tuned")
_BY_NAME: tuple[Callable[[], str | None], ...] = (
    short, pairs, conversations, chats, mechanisms, trace, joins, goals, step, enqueued,
    pieces, transfer, checksums, ranks, pressure,
)  # fmt: skip
TABLES: dict[str, Callable[[], str | None]] = {
    **{make.__name__: make for make in _BY_NAME},
    "other chats": other_chats,
    "joining": partial(_made, "trace-joining.json", trace_report.page),
    "deferred": partial(_made, "trace-deferred.json", trace_report.changes),
    "mechanisms gone": partial(mechanisms, MECHANISMS_GONE),
    # What an ideal tier would take.
    "bound": partial(_made, "trace-joins-newest.json", trace_report.bound),
    "slowest": partial(_made, "trace-joins-newest.json", trace_report.slowest),
    "heads on a GPU": heads,
    "conversations bound": bound_of_conversations,
    "by layer": by_layer,
    "served": partial(_made, "serve.json", _served),
    "served beside": partial(_made, "serve-beside.json", _served),
    "served again": partial(_made, "serve-again.json", _served),
    "served again, default graphs": partial(_made, "serve-again-graphs.json", _served),
    "served first": partial(_made, "serve-first.json", _served),  # the tier still grows
    "joins since": partial(joins, "trace-joins-newest.json"),
    "launches": partial(joins, "trace-launches.json"),
    **{name: partial(probed, name) for name in PROBED},
    "transfer shapes": shapes,
    "checksums said": checksums_said,
    "pressure on the CPU": partial(answers_under_pressure, "pressure-cpu.json"),
    "answers under pressure": partial(answers_under_pressure, "pressure-tokens.json"),
}
