"""Figures of a trace: what each variant took, what switching made of it, and what is the bound.

Everything is in milliseconds. Samples are kept by cycle: a cycle plays every variant, so cycles are
what a bootstrap draws.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from scripts.bench.common import quantile
from scripts.bench.probes.recorder import HOST
from scripts.bench.probes.trace_events import PHASES, Period, Request, Step, Trace

ON, FLOOR = "on", "floor"
FIRST, GAP, LONGEST = "first token", "a token", "longest step"
METRICS = (FIRST, *PHASES, GAP, LONGEST)
SHARES = (50, 90, 99)
MIN_GAPS = 4  # of a request within a period, for a time per token
RESAMPLES = 1000
BEYOND = 0.005  # of the resamples on either side of an interval: there are a dozen columns
LARGE = 0.25  # of the largest load: smaller ones do not show what the bus carries
TAIL = 0.01  # of the requests: the slowest, at least TAIL_LEAST of them
TAIL_LEAST = 5

Samples = dict[int, dict[str, list[float]]]  # cycle, metric


class Figures:
    """What a trace shows.

    Args:
        trace: of an engine.
        drop_s: from a period's begin, in which nothing counts yet.
        guard_s: before its end, in which requests that arrive do not count any more.

    Attributes:
        samples: by variant.
        counted: requests by variant, in order of arrival.
        left_out: requests by variant that computed tokens that were asked before.
        steps: by variant.
    """

    def __init__(self, trace: Trace, drop_s: float, guard_s: float) -> None:
        self._trace = trace
        self.samples: dict[str, Samples] = {}
        self.counted: dict[str, list[Request]] = {}
        self.left_out: dict[str, int] = {}
        self.steps: dict[str, list[Step]] = {}
        whole = _whole_cycles(trace.periods)
        for period in trace.periods:
            if period.cycle in whole:
                self._take_in(period, period.began + drop_s, guard_s)

    def _take_in(self, period: Period, since: float, guard_s: float) -> None:
        variant = period.variant
        samples = self.samples.setdefault(variant, {}).setdefault(
            period.cycle, {metric: [] for metric in METRICS}
        )
        counted = self.counted.setdefault(variant, [])
        for request in self._trace.requests.values():
            samples[GAP] += _per_token(request, since, period.over)
            if request.arrived is None or not since <= request.arrived < period.over - guard_s:
                continue
            if not request.tokens or request.joined is None:
                continue
            if not self._found_whole(request) or (request.blocks == 0) != (variant == FLOOR):
                self.left_out[variant] = self.left_out.get(variant, 0) + 1
                continue
            counted.append(request)
            samples[FIRST].append(request.waits_ms())
            for phase, took_ms in request.phases().items():
                samples[phase].append(took_ms)
        steps = [s for s in self._trace.steps if since <= s.began and s.over <= period.over]
        self.steps.setdefault(variant, []).extend(steps)
        if steps:
            samples[LONGEST].append(max(step.took_ms for step in steps))

    def _found_whole(self, request: Request) -> bool:
        block = self._trace.about["block_tokens"]
        return request.found >= request.history // block * block

    def pooled(self, variant: str, metric: str) -> list[float]:
        """All samples of a metric."""
        return [v for found in self.samples.get(variant, {}).values() for v in found[metric]]

    def document(self, resamples: int = RESAMPLES) -> dict[str, Any]:
        """Everything, for JSON."""
        variants = {variant: self._variant(variant) for variant in self.samples}
        switched = [name for name in self.samples if name not in (ON, FLOOR)]
        return {
            "cycles": len(self.samples.get(ON, {})),
            "variants": variants,
            "changes": {name: self._changes(name, resamples) for name in switched},
            "steps": {name: _by_kind(steps) for name, steps in self.steps.items()},
            "bound": self.bound(),
        }

    def _variant(self, variant: str) -> dict[str, Any]:
        metrics = {metric: self.pooled(variant, metric) for metric in METRICS}
        counted = self.counted[variant]
        return {
            "requests": len(counted),
            "blocks": sum(request.blocks for request in counted) / max(1, len(counted)),
            "left_out": self.left_out.get(variant, 0),
            "metrics": {metric: quantiles(values) for metric, values in metrics.items() if values},
        }

    def _changes(self, variant: str, resamples: int) -> dict[str, Any]:
        """What switching off makes of each metric: off less on, and where that lies."""
        found: dict[str, Any] = {}
        sides = self.samples[variant], self.samples.get(ON, {})
        for metric in METRICS:
            off, on = ({c: metrics[metric] for c, metrics in side.items()} for side in sides)
            if any(off.values()) and any(on.values()):
                found[metric] = change(off, on, resamples)
        return found

    def bound(self) -> dict[str, Any] | None:
        """What an ideal tier would take beside what was measured; None without a floor.

        For each request of the variant `on`: a request of the floor, any of them, and its bytes on
        a bus that serves loads in the order of their requests' arrival and is never idle while one
        waits.
        """
        measured, floor = self.counted.get(ON, []), self.pooled(FLOOR, FIRST)
        ms_per_block = self._ms_per_block()
        if not measured or not floor or not ms_per_block:
            return None
        requests = self._trace.requests.values()
        loads = [r for r in requests if r.blocks and r.arrived is not None]
        loads.sort(key=lambda r: r.arrived or 0.0)
        demands = [(1000 * (r.arrived or 0.0), r.blocks * ms_per_block) for r in loads]
        queued = {r.number: ms for r, ms in zip(loads, first_come_first_served(demands))}
        crossing = [r.blocks * ms_per_block for r in measured]
        waiting = [queued[r.number] for r in measured]
        alone = [f + c for f in floor for c in crossing]
        ideal = [f + c + w for f in floor for c, w in zip(crossing, waiting)]
        rows = {
            "floor": floor,
            "bus": crossing,
            "queueing for the bus": waiting,
            "floor and bus": alone,
            "floor, bus and queueing": ideal,
            "measured": [r.waits_ms() for r in measured],
        }
        gb_per_s = self._trace.about["block_bytes"] / ms_per_block / 1e6
        return {
            "ms_per_block": ms_per_block,
            "gb_per_s": gb_per_s,
            "rows": {name: quantiles(values) for name, values in rows.items()},
            "slowest": slowest(measured, queued),
        }

    def _ms_per_block(self) -> float | None:
        """Of the loads that are large enough to tell."""
        loads = self._trace.loads
        least = LARGE * max((blocks for *_, blocks in loads), default=0)
        before, found = 0.0, []
        for began, over, blocks in loads:
            if blocks and blocks >= least:
                found.append(1000 * (over - max(began, before)) / blocks)
            before = over
        return statistics.median(found) if found else None


def _whole_cycles(periods: Iterable[Period]) -> set[int]:
    """Cycles in which every variant was played as often as in the first one."""
    played: dict[int, list[str]] = {}
    for period in periods:
        played.setdefault(period.cycle, []).append(period.variant)
    first = sorted(next(iter(played.values()), []))
    return {cycle for cycle, variants in played.items() if sorted(variants) == first}


def _per_token(request: Request, since: float, until: float) -> list[float]:
    """The mean time between a request's tokens within a period, if there are enough of them."""
    tokens = request.tokens
    if not tokens or tokens[-1] < since or tokens[0] > until:
        return []
    inside = [at for at in tokens if since <= at <= until]
    gaps = len(inside) - 1
    return [1000 * (inside[-1] - inside[0]) / gaps] if gaps >= MIN_GAPS else []


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """By name; the largest as well."""
    ordered = sorted(values)
    found = {f"p{share}": quantile(ordered, share / 100) for share in SHARES}
    return {**found, "largest": ordered[-1]}


def change(
    off: dict[int, list[float]], on: dict[int, list[float]], resamples: int, seed: int = 0
) -> dict[str, Any]:
    """For each quantile: off less on, and the 99 % interval of a bootstrap over cycles.

    Args:
        off, on: samples by cycle.

    Returns:
        For each of `SHARES` a difference and its interval, None with less than two cycles.
    """
    source = random.Random(seed)
    cycles = sorted(set(off) & set(on))
    drawn: list[list[float]] = []
    for _ in range(resamples if len(cycles) > 1 else 0):
        picked = source.choices(cycles, k=len(cycles))
        drawn.append(_differences(off, on, picked))
    found: dict[str, Any] = {}
    for number, value in enumerate(_differences(off, on, cycles)):
        values = sorted(each[number] for each in drawn)
        interval = [quantile(values, BEYOND), quantile(values, 1 - BEYOND)] if values else None
        found[f"p{SHARES[number]}"] = {"change": value, "interval": interval}
    return found


def _differences(
    off: dict[int, list[float]], on: dict[int, list[float]], cycles: Sequence[int]
) -> list[float]:
    pools = [sorted(v for c in cycles for v in side[c]) for side in (off, on)]
    if not all(pools):
        return [0.0] * len(SHARES)
    return [quantile(pools[0], s / 100) - quantile(pools[1], s / 100) for s in SHARES]


def first_come_first_served(demands: Iterable[tuple[float, float]]) -> list[float]:
    """How long each waits before it is served; (when it comes, how long it takes) in order."""
    free_at, waits = float("-inf"), []
    for at, takes in demands:
        begins = max(at, free_at)
        free_at = begins + takes
        waits.append(begins - at)
    return waits


def slowest(measured: Sequence[Request], queued: dict[int, float]) -> dict[str, Any]:
    """Means over the slowest requests, and over all: of each phase, and of ideal queueing."""
    ordered = sorted(measured, key=Request.waits_ms)
    tail = ordered[-max(TAIL_LEAST, int(TAIL * len(ordered))) :]
    found: dict[str, Any] = {"requests": len(tail)}
    for name, requests in (("slowest", tail), ("all", ordered)):
        phases = [request.phases() for request in requests]
        means = {p: statistics.mean(f[p] for f in phases) for p in PHASES if _all_have(phases, p)}
        means[FIRST] = statistics.mean(r.waits_ms() for r in requests)
        means["queueing for the bus"] = statistics.mean(queued[r.number] for r in requests)
        found[name] = means
    return found


def _all_have(phases: Sequence[dict[str, float]], name: str) -> bool:
    return all(name in found for found in phases)


def _by_kind(steps: Sequence[Step]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in sorted({step.kind for step in steps}):
        own = [step for step in steps if step.kind == kind]
        held = [step.held_ms for step in own if step.held_ms is not None]
        ran = [step.ran_ms for step in own if step.ran_ms is not None]
        found[kind] = {"steps": len(own), "took": quantiles([step.took_ms for step in own])}
        if held and ran:
            found[kind] |= {"held": quantiles(held), "ran": quantiles(ran)}
        host = {part: [s.host_ms[part] for s in own if part in s.host_ms] for part in HOST}
        found[kind]["host"] = {part: quantiles(ms) for part, ms in host.items() if ms}
    return found
