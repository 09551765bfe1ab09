"""Replays traces with other rules for loads, and writes what came of them: two questions.

Load or recompute: is a prefix to be computed where its load takes clearly longer, as the tier does?
Asked at several speeds of the bus; the rule knows both speeds exactly, as no measurement does.

Ahead: are loads to begin for requests that have no run slot yet? Asked with few run slots.

Each is the tier with `eager` and `arc` beside the same with the rule, on the same
traces; the seeds are none of those that numbers were chosen on. `page` makes the tables of
docs/policies.md from the results.
"""

from __future__ import annotations

import statistics
from typing import Any

from scripts import ROOT
from scripts.bench.common import quantile
from scripts.simulate import parallel, sides, workloads
from scripts.simulate.model import LoadRules, Machine, Model

RESULTS = ROOT / "docs" / "measured" / "loads.json"
SEEDS = (4, 5)
TRACES = ("chat", "documents", "mix")
SPEEDS_GBS = (46.0, 6.0, 3.3, 1.6)
RUN_SLOTS = (12, 24)
SMALL_GPU_BLOCKS = 512
AHEAD = 8
PLAIN = LoadRules()
# Question: the machines, each with the figure that is varied, and the rule that is tried.
QUESTIONS: dict[str, tuple[dict[float, Machine], LoadRules]] = {
    "recompute": (
        {gbs: Machine(load_gbs=gbs, store_gbs=gbs) for gbs in SPEEDS_GBS},
        LoadRules(measured=True),
    ),
    "ahead": (
        {slots: Machine(gpu_blocks=SMALL_GPU_BLOCKS, running=slots) for slots in RUN_SLOTS},
        LoadRules(ahead=AHEAD),
    ),
}


def replayed(job: tuple[str, float, str, int, float]) -> dict[str, Any]:
    """Figures of one question, machine, trace and seed, without and with its rule."""
    question, varied, name, seed, seconds = job
    machines, rule = QUESTIONS[question]
    machine = machines[varied]
    trace = workloads.generate(name, seconds, seed)
    row: dict[str, Any] = {"question": question, "varied": varied, "trace": name, "seed": seed}
    for side, loads in (("off", PLAIN), ("on", rule)):
        found = Model(machine, sides.SIDES["arc"].rules(machine), trace, loads).run()
        row[side] = {
            "again": found.again,
            "loaded": found.loaded,
            "first_token_mean": round(statistics.fmean(found.first_token), 4),
            "first_token_p95": round(quantile(found.first_token, 0.95), 4),
        }
    return row


def measure(seconds: float) -> dict[str, Any]:
    """Both questions, on as many cores as there are, with a line on stderr for each row."""
    jobs = [
        (question, varied, name, seed, seconds)
        for question, (machines, _) in QUESTIONS.items()
        for varied in machines
        for name in TRACES
        for seed in SEEDS
    ]
    return parallel.measured(replayed, jobs, seconds)


def main() -> int:
    """Measure and write."""
    return parallel.write(__doc__, RESULTS, measure)
