"""What a request that joins alone costs those that are being answered.

One is alone if no other request joins, and no other load begins, within `APART` steps of its own.
What it costs is the time of the steps around it, beyond as many steps of decodes.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from scripts.bench.probes.trace_events import Period, Request, Step, Trace

APART = 4
AROUND = 3  # steps before and behind the one that is joined, whose time counts
LEAST = 5  # joins, for figures of them


def joins_alone(trace: Trace, drop_s: float) -> list[dict[str, Any]]:
    """Figures for each variant, and for each number of steps from a load's begin to its request's.

    Args:
        trace: of an engine.
        drop_s: from a period's begin, in which nothing counts yet.

    Returns:
        Rows in milliseconds: medians, but for the mean cost.
    """
    steps, found = trace.steps, dict[tuple[str, int | None], list[tuple[Step, Request, float]]]()
    decodes = [step.took_ms for step in steps if not (step.joins or step.beside)]
    if not decodes:
        return []
    decode_ms = statistics.median(decodes)
    for at, request in _alone(trace):
        variant = _variant_at(trace.periods, steps[at].scheduled, drop_s)
        first, last = steps[at - AROUND], steps[at + AROUND]
        cost = 1000 * (last.over - first.over) - 2 * AROUND * decode_ms
        if variant and request.first is not None and request.arrived is not None:
            key = variant, _steps_ahead(steps, at, request)
            found.setdefault(key, []).append((steps[at], request, cost))
    return [
        _row(*key, joins) for key, joins in sorted(found.items(), key=str) if len(joins) >= LEAST
    ]


def _alone(trace: Trace) -> Iterator[tuple[int, Request]]:
    """Steps that one request joins alone, by their place, and that request."""
    steps = trace.steps
    begun = sorted(r.begun for r in trace.requests.values() if r.begun is not None)
    for at in range(APART, len(steps) - APART):
        around = steps[at - APART : at + APART + 1]
        if len(steps[at].new) != 1 or sum(step.joins for step in around) != 1:
            continue
        request = trace.requests[steps[at].new[0]]
        since, until = around[0].scheduled, around[-1].over
        loads = bisect_left(begun, until) - bisect_left(begun, since)
        if loads == (request.begun is not None):
            yield at, request


def _steps_ahead(steps: list[Step], at: int, request: Request) -> int | None:
    """Steps scheduled from the begin of its load to the one that it joined; None without one."""
    if request.begun is None:
        return None
    return sum(step.scheduled > request.begun for step in steps[at - APART : at + 1]) - 1


def _variant_at(periods: list[Period], when: float, drop_s: float) -> str:
    return next((p.variant for p in periods if p.began + drop_s <= when < p.over), "")


def _row(
    variant: str, ahead: int | None, joins: list[tuple[Step, Request, float]]
) -> dict[str, Any]:
    launches = [s.host_ms["launches"] for s, _, _ in joins if "launches" in s.host_ms]
    costs = [cost for _, _, cost in joins]
    return {
        "variant": variant,
        "steps_ahead": ahead,
        "joins": len(joins),
        "cost": statistics.median(costs),
        "cost_mean": statistics.mean(costs),
        "first": statistics.median(request.waits_ms() for _, request, _ in joins),
        "launches": statistics.median(launches) if launches else None,
    }
