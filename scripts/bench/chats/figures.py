"""Figures of `bench chats`: what each is taken from, and how two modes are compared.

A figure is of one job. Of several jobs of a mode the median is shown. A ratio to the floor is taken
within one run, where there was a floor in it; else between medians of different runs, and marked.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scripts.bench.chats.server import FLOOR
from scripts.bench.common import quantile

BEFORE = "before a join"
Job = dict[str, Any]
Samples = list[float]


@dataclass(frozen=True)
class Figure:
    """A number of a job.

    Attributes:
        of: the number, from a phase's result; None where it has none.
        low: whether less is better.
        ratio: whether a ratio to the floor says something.
    """

    phase: str
    title: str
    of: Callable[[dict[str, Any]], float | None]
    low: bool = True
    ratio: bool = True

    def value(self, job: Job) -> float | None:
        """The number of one job, None where the phase was not played."""
        result = job["results"].get(self.phase)
        return None if result is None else self.of(result)


def first_token(share: float) -> Callable[[dict[str, Any]], float]:
    """Time to the first token, a quantile over requests."""
    return lambda result: quantile(result["first"], share)


def per_token(share: float) -> Callable[[dict[str, Any]], float]:
    """Time per output token behind the first, a quantile over requests."""
    return lambda result: quantile(
        [
            (whole - first) / (count - 1)
            for whole, first, count in zip(result["whole"], result["first"], result["tokens"])
            if count > 1
        ],
        share,
    )


def whole(share: float) -> Callable[[dict[str, Any]], float]:
    """Time to the last token, a quantile over requests."""
    return lambda result: quantile(result["whole"], share)


def gap(name: str) -> Callable[[dict[str, Any]], float | None]:
    """Time between two tokens of a request, over all of them."""
    return lambda result: result["gaps"].get(name)


def step(kind: str) -> Callable[[dict[str, Any]], float | None]:
    """The mean time of the engine's steps of a kind, as clients see them; see `steps`."""
    return lambda result: result.get("steps", {}).get(kind, {}).get("ms")


def throughput(result: dict[str, Any]) -> float:
    """Tokens answered in a second."""
    return float(sum(result["tokens"]) / result["seconds"])


def found(result: dict[str, Any]) -> float:
    """Prompt tokens found in a cache, in percent."""
    return float(100 * sum(result["cached"]) / sum(result["prompt"]))


def single(kind: str, what: str) -> Callable[[dict[str, Any]], float | None]:
    """The median over the prompts of a kind: `first`, or what came behind the first token."""

    def of(result: dict[str, Any]) -> float | None:
        values = [
            first if what == "first" else whole - first
            for first, whole, own in zip(result["first"], result["whole"], result["kinds"])
            if own == kind
        ]
        return statistics.median(values) if values else None

    return of


def _chats(phase: str, words: str) -> list[Figure]:
    return [
        Figure(phase, f"{words}: first token, p50, ms", first_token(0.5)),
        Figure(phase, f"{words}: first token, p90, ms", first_token(0.9)),
        Figure(phase, f"{words}: first token, p99, ms", first_token(0.99)),
        Figure(phase, f"{words}: first token, largest, ms", first_token(1.0)),
        Figure(phase, f"{words}: per output token, p50, ms", per_token(0.5)),
        Figure(phase, f"{words}: per output token, p99, ms", per_token(0.99)),
        Figure(phase, f"{words}: between tokens, p99, ms", gap("p99")),
        Figure(phase, f"{words}: between tokens, largest, ms", gap("largest")),
        Figure(phase, f"{words}: a step of decodes, mean, ms", step("decodes")),
        Figure(phase, f"{words}: the step before one that a request joins, ms", step(BEFORE)),
        Figure(phase, f"{words}: a step that a request joins, ms", step("join")),
        Figure(phase, f"{words}: whole answer, p50, ms", whole(0.5)),
        Figure(phase, f"{words}: whole answer, p99, ms", whole(0.99)),
        Figure(phase, f"{words}: tokens answered a second", throughput, low=False),
        Figure(phase, f"{words}: prompt tokens found, %", found, low=False, ratio=False),
    ]


def _singles(phase: str, words: str) -> list[Figure]:
    kinds = {
        "whole": "ends on a block",
        "ragged": "does not end on a block",
        "extended": "more tokens behind it",
    }
    made = [
        Figure(phase, f"{words}: {title}, first token, ms", single(kind, "first"))
        for kind, title in kinds.items()
    ]
    decoded = "the decode steps behind such a hit, ms"
    made.append(Figure(phase, f"{words}: {decoded}", single("decoded", "behind")))
    made.append(Figure(phase, f"{words}: prompt tokens found, %", found, low=False, ratio=False))
    return made


LATER = _chats("later", "later turns")
FIRST = [figure for figure in _chats("first", "first turns") if "p9" not in figure.title]
QUIET, AFTER = _singles("quiet", "quiet"), _singles("after", "after the chats")


@dataclass
class Shown:
    """A figure of a mode, over all its jobs."""

    values: Samples
    ratio: float | None = None
    paired: bool = True

    @property
    def median(self) -> float:
        """The middle of the jobs."""
        return statistics.median(self.values)


def shown(jobs: list[Job], figure: Figure, mode: str) -> Shown | None:
    """A figure of a mode beside the floor's; None if no job has it."""
    own = [(job["run"], figure.value(job)) for job in jobs if job["mode"] == mode]
    floor = [(job["run"], figure.value(job)) for job in jobs if job["mode"] == FLOOR]
    made = Shown([value for _, value in own if value is not None])
    if not made.values:
        return None
    floors = [value for _, value in floor if value]
    if mode == FLOOR or not figure.ratio or not floors:
        return made
    by_run = {run: value for run, value in floor if value}
    pairs = [value / by_run[run] for run, value in own if value is not None and run in by_run]
    made.paired = bool(pairs)
    made.ratio = statistics.median(pairs) if pairs else made.median / statistics.median(floors)
    return made
