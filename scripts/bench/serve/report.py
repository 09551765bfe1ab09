"""What `bench serve` found: figures by mode, a table, targets met or missed, a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from scripts.bench.common import bars, pyplot, say, summary, table, verdict
from scripts.bench.serve import pairs, pressed
from scripts.bench.serve.sizes import STARTS

Samples = list[float]


@dataclass(frozen=True)
class Figure:
    """One row of the table: how its samples are taken from a job's record.

    Attributes:
        group: figures of one group share a picture.
    """

    key: str
    title: str
    group: str
    samples: Callable[[dict[str, Any]], Iterable[float]]


def _of(scenario: str) -> Callable[[dict[str, Any]], Samples]:
    return lambda job: job["results"].get(scenario, {}).get("samples", [])


def _again(scenario: str) -> Callable[[dict[str, Any]], Samples]:
    return lambda job: job["results"].get(scenario, {}).get("again", {}).get("samples", [])


def _phase(scenario: str, kind: str, name: str) -> Callable[[dict[str, Any]], Samples]:
    return lambda job: [p[name] for p in job["results"].get(scenario, {}).get(kind, [])]


def _ratio(scenario: str, kind: str) -> Callable[[dict[str, Any]], Samples]:
    def of(job: dict[str, Any]) -> Samples:
        phases = job["results"].get(scenario, {})
        quiet = [phase["p99"] for phase in phases.get("quiet", [])]
        return [phase["p99"] / median(quiet) for phase in phases.get(kind, []) if quiet]

    return of


def _start(engine: str) -> Callable[[dict[str, Any]], Samples]:
    def samples(job: dict[str, Any]) -> Samples:
        counts = job["engine"] == engine and job["start_s"] is not None
        beside = job.get("side_by_side", False)  # other engines held memory meanwhile
        return [job["start_s"]] if counts and not beside else []

    return samples


def _arrivals(scenario: str, title: str) -> list[Figure]:
    shown = f"{title}, between tokens (ms)"
    rows = [
        ("quiet_p50", "quiet, p50 (ms)", shown, _phase(scenario, "quiet", "p50")),
        ("quiet", "quiet, p99 (ms)", shown, _phase(scenario, "quiet", "p99")),
        ("arrivals_p50", "arrivals, p50 (ms)", shown, _phase(scenario, "arrivals", "p50")),
        ("arrivals", "arrivals, p99 (ms)", shown, _phase(scenario, "arrivals", "p99")),
        ("gpu", "GPU hits arrive, p99 (ms)", shown, _phase(scenario, "gpu", "p99")),
        ("ratio", "p99, arrivals/quiet", "", _ratio(scenario, "arrivals")),
        ("gpu_ratio", "p99, GPU hits/quiet", "", _ratio(scenario, "gpu")),
        ("max", "arrivals, largest (ms)", "", _phase(scenario, "arrivals", "max")),
        ("ttft", "arrivals, first token, p50 (ms)", "", _phase(scenario, "arrivals", "ttft_p50")),
    ]
    return [Figure(f"{scenario}_{key}", f"{title} {name}", *rest) for key, name, *rest in rows]


FIGURES = [
    Figure("s1", "S1 first token (s)", "S1: time to first token (s)", _of("s1")),
    Figure("s1again", "S1, from the GPU (s)", "", _again("s1")),
    Figure("s1long", "S1 long, first token (s)", "S1: time to first token (s)", _of("s1long")),
    Figure("s3", "S3 a turn (s)", "S3, S2 (s)", _of("s3")),
    Figure("s2", "S2 (s)", "S3, S2 (s)", _of("s2")),
    *_arrivals("s4", "S4"),
    *_arrivals("s4graphs", "S4, default graphs"),
    *(
        Figure(f"pressure_{key}", title, "", pressed.samples(key, unit))
        for key, title, unit in pressed.ROWS
    ),
    Figure("start", "engine start (s)", "Engine start (s)", _start("main")),
    Figure("startgraphs", "engine start, default graphs (s)", "", _start("graphs")),
]

Found = dict[str, dict[str, dict[str, Any]]]  # figure, mode -> summary


def figures(document: dict[str, Any]) -> Found:
    """The samples of all jobs put together, by figure and mode."""
    found: Found = {}
    for figure in FIGURES:
        by_mode: dict[str, Samples] = {}
        for job in document["jobs"]:
            by_mode.setdefault(job["mode"], []).extend(figure.samples(job))
        kept = {mode: summary(values) for mode, values in by_mode.items() if values}
        if kept:
            found[figure.key] = kept
    return found


def modes_of(document: dict[str, Any]) -> list[str]:
    """The modes in the order in which they first ran."""
    return list(dict.fromkeys(job["mode"] for job in document["jobs"]))


def text(document: dict[str, Any]) -> str:
    """Table, checks, verdicts."""
    found, names = figures(document), modes_of(document)
    titles = {figure.key: figure.title for figure in FIGURES}
    rows = [["median (smallest to largest)", *names]]
    for key, by_mode in found.items():
        rows.append([titles[key], *(_cell(by_mode.get(mode)) for mode in names)])
    rows += _cached_rows(document, names)
    lines = [table(rows), "", *_answers(document), *_failures(document)]
    lines += pairs.lines(document) + pressed.answers(document["jobs"])
    return "\n".join([*lines, "Targets (ours):", *_verdicts(found, document)])


def _cell(value: dict[str, Any] | None) -> str:
    if value is None:
        return "-"
    return f"{value['median']:.4g} ({value['min']:.4g} to {value['max']:.4g})"


def _results(document: dict[str, Any], mode: str, scenario: str) -> list[Any]:
    found = [job["results"].get(scenario) for job in document["jobs"] if job["mode"] == mode]
    return [result for result in found if result]


def _cached_rows(document: dict[str, Any], names: list[str]) -> list[list[str]]:
    """Shares of prompts found in a cache: a fast wrong scenario shows here."""
    rows = []
    titles = {"s1": "S1", "s1long": "S1 long", "s3": "S3", "s4": "S4 arrivals",
              "s4graphs": "S4, default graphs, arrivals"}  # fmt: skip
    for scenario, title in titles.items():
        row = [f"{title}: share of prompts cached"]
        for mode in names:
            results = _results(document, mode, scenario)
            if scenario.startswith("s4"):
                shares = [phase["cached"] for r in results for phase in r["arrivals"]]
            else:
                shares = [share for r in results for share in r["cached"]]
            row.append(f"{min(shares):.0%} to {max(shares):.0%}" if shares else "-")
        if set(row[1:]) != {"-"}:
            rows.append(row)
    row = ["one-token requests found again"]
    for mode in names:
        results = _results(document, mode, "one")
        row.append(" ".join(f"{r['hits']} of {r['asked']}" for r in results) or "-")
    return [*rows, row] if set(row[1:]) != {"-"} else rows


def _answers(document: dict[str, Any]) -> list[str]:
    """Whether single requests got the answers of a plain engine that kept every prefix."""
    plain = _results(document, "off", "tokens")
    lines = []
    for mode in modes_of(document):
        if mode == "off" or not plain:
            continue
        for result in _results(document, mode, "tokens"):
            pairs = list(zip(plain[0]["answers"], result["answers"]))
            equal = sum(a == b for a, b in pairs)
            lines.append(
                f"{mode}: {equal} of {len(pairs)} answers equal to plain vLLM's, "
                f"{result['cached']} prompt tokens cached ({plain[0]['cached']} there)"
            )
    return [*lines, ""] if lines else []


def _failures(document: dict[str, Any]) -> list[str]:
    lines = [
        f"{job['mode']} on engine {job['engine']}, round {job['round']}: {job['error']}"
        for job in document["jobs"]
        if job["error"]
    ]
    return [*dict.fromkeys(lines), ""] if lines else []


def _median(found: Found, key: str, mode: str) -> float | None:
    value = found.get(key, {}).get(mode)
    return value["median"] if value else None


def _verdicts(found: Found, document: dict[str, Any]) -> list[str]:
    ours, off = (lambda key: _median(found, key, "ours")), (lambda key: _median(found, key, "off"))

    def against(key: str, plain: float | None, how: Callable[[float, float], float]) -> Any:
        value = ours(key)
        return None if value is None or plain is None else how(value, plain)

    pressure = pressed.verdicts(lambda key, mode: _median(found, key, mode), modes_of(document))
    one = _results(document, "ours", "one")
    lines = [
        verdict("S1", ours("s1"), 0.040, " s"),
        verdict("S1 long", ours("s1long"), 0.062, " s"),
        verdict("S3, a turn", ours("s3"), 2.0, " s"),
        verdict("S2 over off", against("s2", off("s2"), lambda a, b: a / b), 1.01),
        verdict("S4, p99 over p99 without arrivals", ours("s4_ratio"), 1.2),
        verdict("S4, default graphs, the same", ours("s4graphs_ratio"), 1.2),
        *(verdict(f"{key} over off", against(key, off(key), lambda a, b: a - b), 1.5, " s")
          for key in STARTS.values()),
        verdict("one-token requests found again, share",
                one[0]["hits"] / one[0]["asked"] if one else None, 1.0, most=False),
    ]  # fmt: skip
    for other in ("simple", "offloading", "lmcache"):
        for key in ("s1", "s1long", "s3", "s2", "s4_arrivals"):
            value = _median(found, key, other)
            if value is not None:
                ratio = against(key, value, lambda a, b: a / b)
                lines.append(verdict(f"{key} over {other}", ratio, 1.0))
    return lines + pressure


def draw(document: dict[str, Any], path: Path) -> None:
    """One picture: a panel for each group of figures, bars by mode, lines from min to max."""
    plt, found = pyplot(), figures(document)
    groups: dict[str, list[Figure]] = {}
    for figure in FIGURES:
        if figure.group and figure.key in found:
            groups.setdefault(figure.group, []).append(figure)
    if plt is None or not groups:
        return
    columns = min(3, len(groups))
    lines = -(-len(groups) // columns)
    sheet, panels = plt.subplots(
        lines, columns, figsize=(4.6 * columns, 3.4 * lines), layout="constrained", squeeze=False
    )
    used = [mode for mode in modes_of(document) if any(mode in found[key] for key in found)]
    for axes, (title, shown) in zip(panels.flat, groups.items()):
        series = {mode: [found[f.key].get(mode) for f in shown] for mode in used}
        labels = [f.title.split("(")[0].replace(", ", "\n").strip() for f in shown]
        bars(axes, labels, series)
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
    for axes in panels.flat[len(groups) :]:
        axes.set_visible(False)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    sheet.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    machine = document["machines"][-1] if document["machines"] else {}
    sheet.suptitle(f"{machine.get('gpu', '')}, vLLM {machine.get('vllm', '')}", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.savefig(path, dpi=150)
    plt.close(sheet)
    say(f"Picture: {path}")
