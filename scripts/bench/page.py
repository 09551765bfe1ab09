"""python scripts/bench page [--check]

Makes the tables of docs/performance.md and docs/mechanisms.md, the picture of the first and the
short table of README.md from the results in docs/measured/current. The words around the tables are
written by hand; a table stands between two comments that name it. With --check nothing is written,
and status 1 says that a page is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from typing import Any

from scripts.bench.chats import report as chats_report
from scripts.bench.common import ROOT, say, table
from scripts.bench.probes import trace_report
from scripts.bench.serve import pressed
from scripts.bench.serve import report as serve

RESULTS = ROOT / "docs" / "measured" / "current"
PAGE = ROOT / "docs" / "performance.md"
PARTS = ROOT / "docs" / "mechanisms.md"
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "performance.png"
MODES = {
    "off": "no tier",
    "ours": "this tier",
    "before": "this tier at d7e3e02",
    "simple": "SimpleCPUOffloadConnector",
    "offloading": "OffloadingConnector",
}
# Figures of `bench serve` on the page: key, words, factor to the unit in the words.
SERVED = (
    ("s1", "S1: first token of 8,192 tokens in CPU memory, ms", 1000),
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
TWO_GPUS = {
    "chats-tensor.json": "two GPUs, tensor parallel",
    "chats-stages.json": "two GPUs, two pipeline stages",
}
MECHANISMS = {
    "mechanisms-ahead.json": "default graphs, 12 sessions at a time, beside a second server",
    "mechanisms-arrivals.json": "default graphs, 14 sessions a second beside 12 decodes",
    "mechanisms-chats.json": "default graphs, 12 sessions at a time, each back at once",
    "mechanisms-default.json": "default graphs, 60 sessions in turns",
    "mechanisms-quiet.json": "eager prefill, quiet engine",
    "mechanisms-s3.json": "eager prefill, 60 sessions in turns",
}


def read(name: str) -> Any:
    """One result; None where it was not measured."""
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def cell(values: list[float], factor: float = 1.0) -> str:
    """Median, smallest and largest, to three digits."""
    if not values:
        return "-"
    middle, low, high = (factor * f(values) for f in (statistics.median, min, max))
    return f"{_digits(middle)} ({_digits(low)} to {_digits(high)})"


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def served() -> str:
    """S1 to S3 and the start by mode, the commit before beside this one."""
    document, before = read("serve.json"), read("serve-before.json")
    if document is None:
        return "not measured"
    found = serve.figures(document)
    if before is not None:
        for key, by_mode in serve.figures(before).items():
            found.setdefault(key, {})["before"] = by_mode["ours"]
    shown = [mode for mode in MODES if any(mode in by_mode for by_mode in found.values())]
    rows = [["median (smallest to largest)", *(MODES[mode] for mode in shown)]]
    for key, words, factor in SERVED:
        by_mode = found.get(key, {})
        samples = [by_mode.get(mode, {"samples": []})["samples"] for mode in shown]
        rows.append([words, *(cell(values, factor) for values in samples)])
    return table(rows) + "\n\n" + ran_on(document["machines"][-1])


def pairs() -> str:
    """S1, S3 and the start beside the commit before, each pair at once on two GPUs of one host."""
    words = {"graphs": "default graphs", "eager": "eager prefill"}
    sides = [(graphs, side) for graphs in words for side in ("new", "old")]
    documents = [read(f"pair-{graphs}-{side}.json") for graphs, side in sides]
    if None in documents:
        return "not measured"
    rows = [["median (smallest to largest)"]]
    rows[0] += [f"{words[g]}, {'this tier' if s == 'new' else MODES['before']}" for g, s in sides]
    for key, what, factor in (SERVED[0], SERVED[1], SERVED[3]):
        found = [serve.figures(document).get(key, {}) for document in documents]
        samples = [by_mode["ours"]["samples"] if by_mode else [] for by_mode in found]
        rows.append([what, *(cell(values, factor) for values in samples)])
    ran = [ran_on(document["machines"][-1]) for document in documents]
    return "\n\n".join([table(rows), *ran])


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
    ran = ran_on(document["machines"][-1]).partition(": `")[0]
    return f"{table(rows)}\n\n{ran}."


def _middle(values: list[float], factor: float) -> str:
    return _digits(factor * statistics.median(values)) if values else "-"


def chats() -> str:
    """Conversations over HTTP, beside plain vLLM whose GPU cache holds everything."""
    document = read("chats.json")
    if document is None:
        return "not measured"
    ran = dict.fromkeys(ran_on(machine) for machine in document["machines"])
    return "\n\n".join([chats_report.tables(document), chats_report.EXPLAINED, *ran])


def chats_on_two() -> str:
    """Turns that come back, on engines of two GPUs."""
    parts = []
    for name, words in TWO_GPUS.items():
        document = read(name)
        if document is not None:
            parts.append(chats_report.later(document, words))
            parts += dict.fromkeys(ran_on(machine) for machine in document["machines"])
    return "\n\n".join(parts) or "not measured"


def mechanisms() -> str:
    """What each mechanism is worth: all rounds of one engine, one switched off at a time."""
    parts = []
    for name, words in MECHANISMS.items():
        document = read(name)
        if document is not None:
            parts.append(f"{words}, ms:\n\n{_by_mechanism(document['rounds'])}")
            parts.append(ran_on(document["machine"]))
    return "\n\n".join(parts) or "not measured"


def trace() -> str:
    """What switching a mechanism changes, by time in the engine."""
    document = read("trace.json")
    if document is None:
        return "not measured"
    words = trace_report.EXPLAINED
    return "\n\n".join([trace_report.page(document), words, ran_on(document["machine"])])


def bound() -> str:
    """What an ideal tier would take, from the same trace."""
    document = read("trace.json")
    if document is None:
        return "not measured"
    return trace_report.bound(document) + "\n\n" + ran_on(document["machine"])


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
    document = read("step.json")
    if document is None:
        return "not measured"
    from scripts.bench import step as bench_step

    return bench_step.page(document) + "\n\n" + ran_on(document["machine"])


def transfer() -> str:
    """Shares of what plain copies of one pinned buffer reach."""
    document = read("../2026-11-22-transfer-f35c44a.json")
    if document is None:
        return "not measured"
    from scripts.bench.transfer import report

    return report.page(document) + "\n\n" + ran_on(document["machine"])


def checksums() -> str:
    """How fast copies with checksums are beside copies without."""
    document = read("transfer-checksums.json")
    if document is None:
        return "not measured"
    from scripts.bench.transfer import report

    return report.checksums(document) + "\n\n" + ran_on(document["machine"])


def pressure() -> str:
    """Chats that the GPU's cache cannot hold while they run."""
    document = read("pressure.json")
    if document is None:
        return "not measured"
    ran = dict.fromkeys(ran_on(machine) for machine in document["machines"])
    return "\n\n".join([pressed.page(document["jobs"], MODES), *ran])


def ranks() -> str:
    """The same with two ranks."""
    document = read("../2026-11-22-serve-ranks-f05b92d.json")
    if document is None:
        return "not measured"
    found = serve.figures(document)
    shown = [mode for mode in MODES if any(mode in by_mode for by_mode in found.values())]
    rows = [["two GPUs, tensor parallel", *(MODES[mode] for mode in shown)]]
    for key, words, factor in SERVED[:2]:
        by_mode = found.get(key, {})
        samples = [by_mode.get(mode, {"samples": []})["samples"] for mode in shown]
        rows.append([words, *(cell(values, factor) for values in samples)])
    return table(rows) + "\n\n" + ran_on(document["machines"][-1])


def ran_on(machine: dict[str, Any]) -> str:
    """Commit, date, machine and command of a result."""
    gpu = machine.get("gpu", "none")
    where = gpu.split(",")[0] if gpu != "none" else machine.get("cpu", "CPU")
    return (
        f"Commit {machine['commit']}, {machine['date'][:10]}, {where}, {machine['cpus']} cores, "
        f"vLLM {machine['vllm']}: `{machine['command']}`"
    )


TABLES: dict[str, Callable[[], str | None]] = {
    "short": short,
    "served": served,
    "pairs": pairs,
    "chats": chats,
    "chats on two": chats_on_two,
    "mechanisms": mechanisms,
    "trace": trace,
    "bound": bound,
    "step": step,
    "transfer": transfer,
    "checksums": checksums,
    "ranks": ranks,
    "pressure": pressure,
}


def filled(text: str) -> str:
    """The page with every table that it has made from the results."""
    for name, make in TABLES.items():
        begin, end = f"<!-- table: {name} -->", f"<!-- end: {name} -->"
        if begin not in text or (content := make()) is None:
            continue
        made = f"{begin}\n{content}\n{end}"
        text = re.sub(
            re.escape(begin) + ".*?" + re.escape(end), lambda _, m=made: m, text, flags=re.S
        )
    return text


def draw() -> None:
    """The picture: S1 and S3 by mode."""
    document, before = read("serve.json"), read("serve-before.json")
    if document is None:
        return
    jobs = [{**job, "mode": MODES[job["mode"]]} for job in document["jobs"]]
    if before is not None:
        jobs += [{**j, "mode": MODES["before"]} for j in before["jobs"] if j["mode"] == "ours"]
    serve.draw({**document, "jobs": jobs}, PICTURE)


def main() -> int:
    """Write the pages, or say whether they are right."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1: not right")
    options = parser.parse_args()
    pages = {page: page.read_text() for page in (PAGE, PARTS, README)}
    wrong = [page.name for page, text in pages.items() if filled(text) != text]
    if options.check:
        say(f"not what the results say: {wrong}" if wrong else "as the results say")
        return int(bool(wrong))
    for page, text in pages.items():
        page.write_text(filled(text))
    draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
