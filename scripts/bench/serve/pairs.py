"""S4 side by side: this tier's p99 over the others' of the same round, as lines of text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

Job = dict[str, Any]  # as it is recorded
Ratios = dict[str, list[float]]  # by kind of phase, one for each round that both played


def lines(document: dict[str, Any]) -> list[str]:
    """Medians and ranges of the ratios, by scenario and pair of modes.

    Beside those of phases in which sessions arrive, those of quiet ones: what two processes differ
    by without any load.
    """
    found: dict[tuple[str, str, str], Ratios] = {}
    for ours, other in _pairs(document["jobs"]):
        for scenario, phases in ours["results"].items():
            against = other["results"].get(scenario, {})
            ratios = found.setdefault((scenario, ours["mode"], other["mode"]), {})
            for kind in ("arrivals", "quiet"):
                both = zip(phases[kind], against.get(kind, []))
                ratios.setdefault(kind, []).extend(a["p99"] / b["p99"] for a, b in both)
    made = [
        f"  {scenario}, {one} over {two}: {_words(ratios['arrivals'])};"
        f" quiet {_words(ratios['quiet'])}"
        for (scenario, one, two), ratios in found.items()
        if ratios["arrivals"]
    ]
    title = "Side by side, p99 while sessions arrive over the other's in the same round:"
    return [title, *made, ""] if made else []


def _pairs(jobs: list[Job]) -> Iterator[tuple[Job, Job]]:
    """Each job of this tier with each other job of its set; two of this tier once only."""
    sets: dict[str, list[Job]] = {}
    for job in jobs:
        if job.get("set"):  # files of earlier runs have none
            sets.setdefault(job["set"], []).append(job)
    for together in sets.values():
        ours = [job for job in together if job["mode"].split("+")[0] == "ours"]
        for number, job in enumerate(ours):
            before = [other["mode"] for other in ours[: number + 1]]
            yield from ((job, other) for other in together if other["mode"] not in before)


def _words(ratios: list[float]) -> str:
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    return f"median {statistics.median(ratios):.3f} ({spread}) of {len(ratios)}"
