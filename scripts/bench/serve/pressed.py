"""What `bench serve` found under pressure, as rows of its table and lines of text."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from scripts.bench.common import cell, table, verdict

OTHERS = ("simple", "offloading", "lmcache")
ROWS = (
    ("seconds", "pressure, whole (s)", 1.0),
    ("times_the_cache", "pressure, KV over the GPU's cache", 1.0),
    ("recomputed", "pressure, recomputed (thousand tokens)", 1e3),
    ("preemptions", "pressure, preemptions", 1.0),
    ("first_p50", "pressure, first token, p50 (s)", 1.0),
    ("longest_wait", "pressure, longest wait for a token (s)", 1.0),
)
# Of the check of answers. Steps are not seconds: copies that take no time change only the latter.
SMALL_ROWS = (
    ("times_the_cache", "KV over the GPU's cache"),
    ("recomputed", "recomputed, tokens"),
    ("preemptions", "preemptions"),
    ("longest_wait_steps", "longest wait for a token, steps"),
    ("steps", "all steps"),
)
Job = dict[str, Any]  # as it is recorded


def samples(key: str, unit: float) -> Callable[[Job], list[float]]:
    """Reads a figure from a job."""

    def of(job: Job) -> list[float]:
        found = job["results"].get("pressure")
        return [found[key] / unit] if found else []

    return of


def page(jobs: list[Job], names: dict[str, str]) -> str:
    """The table of docs/performance.md; a mode's median of its jobs.

    Args:
        names: words for each mode, in the order of the columns.
    """
    modes = [mode for mode in names if any(job["mode"] == mode for job in jobs)]
    rows = [["chats, all at once", *(names[mode] for mode in modes)]]
    for key, title, unit in ROWS:
        of = samples(key, unit)
        found = [[v for job in jobs if job["mode"] == mode for v in of(job)] for mode in modes]
        cells = [f"{statistics.median(values):.3g}" if values else "-" for values in found]
        rows.append([title.removeprefix("pressure, "), *cells])
    return table(rows)


def small_page(jobs: list[Job], names: dict[str, str]) -> str:
    """The table of docs/measurements.md: the same chats on the small model, all rounds.

    Args:
        names: words for each mode, in the order of the columns.
    """
    played = _small(jobs)
    modes = [mode for mode in names if any(mode == other for other, _ in played)]
    rows = [["median (smallest to largest)", *(names[mode] for mode in modes)]]
    for key, title in SMALL_ROWS:
        found = [[result[key] for other, result in played if other == mode] for mode in modes]
        rows.append([title, *map(cell, found)])
    counts = [[n for other, n in _equal_answers(played) if other == mode] for mode in modes]
    whole = sum(len(chat) for chat in played[0][1]["answers"])
    rows.append([f"answers equal to one chat at a time's, of {whole}", *map(cell, counts)])
    return table(rows)


def answers(jobs: list[Job]) -> list[str]:
    """Whose greedy answers are those that plain vLLM gives to one chat at a time.

    A chat's later answers follow from its earlier ones, so they are compared up to the first
    difference, and what follows it counts as different. What batches alone change, plain vLLM
    under pressure shows.
    """
    played = _small(jobs)
    lines = [
        f"  {mode}: {equal} of {sum(map(len, result['answers']))} equal,"
        f" {result['recomputed']:,} tokens recomputed, {result['preemptions']} preemptions"
        for (mode, result), (_, equal) in zip(played, _equal_answers(played))
    ]
    if not lines:
        return []
    return ["Answers under pressure, beside plain vLLM's to one chat at a time:", *lines, ""]


def _small(jobs: list[Job]) -> list[tuple[str, dict[str, Any]]]:
    """Mode and result of each job that played on the small model."""
    played = [(job["mode"], job["results"].get("pressure_tokens")) for job in jobs]
    return [(mode, result) for mode, result in played if result]


def _equal_answers(played: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, int]]:
    """Mode and count of each; nothing if plain vLLM did not answer one chat at a time."""
    alone = next((result["alone"] for _, result in played if "alone" in result), None)
    if alone is None:
        return []
    return [(mode, sum(map(_equal, alone, result["answers"]))) for mode, result in played]


def _equal(one: list[Any], other: list[Any]) -> int:
    """How many are equal before the first that is not."""
    for number, (a, b) in enumerate(zip(one, other)):
        if a != b:
            return number
    return len(one)


def verdicts(median: Callable[[str, str], float | None], names: list[str]) -> list[str]:
    """Each mode of this tier beside the others: fewer tokens recomputed, and nobody starves.

    Args:
        median: of a row's key and a mode.
        names: all modes.
    """
    ours = [name for name in names if name.split("+")[0] == "ours"]
    pairs = [(one, two, "recomputed") for one in ours for two in OTHERS]
    pairs += [(one, "off", "longest_wait") for one in ours]
    lines = []
    for one, two, key in pairs:
        value, other = median(f"pressure_{key}", one), median(f"pressure_{key}", two)
        if value is not None and other is not None:
            title = f"pressure, {key.replace('_', ' ')}, {one} over {two}"
            lines.append(verdict(title, value / other if other else float(value > 0), 1.0))
    return lines
