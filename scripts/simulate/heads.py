"""What is found on the GPU if it keeps heads of prefixes alone, beside one that keeps whole ones.

Every generated trace is replayed with the tier's defaults, and conversations that take turns. How
much of a prefix is kept is the tier's own choice (`kvoffload_patch/tier/prefix_share.py`). Writes
docs/measured/heads.json, and `page` makes the table of docs/policies.md from that.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from kvoffload_patch.tier.prefix_share import NO_HIT, Hit, PrefixShare
from kvoffload_patch.tier.tuning import HEADS_FRONT_BLOCKS
from scripts import ROOT
from scripts.bench.common import table
from scripts.simulate import parallel, sides, workloads
from scripts.simulate.model import Machine, Model
from scripts.simulate.rules import Rules, Run
from scripts.simulate.spread import by_seed, change
from scripts.simulate.trace import Request

RESULTS = ROOT / "docs" / "measured" / "heads.json"
SEEDS = (0, 1, 2)
DEFAULT = "auto-adaptive"
KEPT = ("whole", "auto")


class HeadsModel(Model):
    """A replay in which tails that the tier has are handed out first."""

    def __init__(self, machine: Machine, rules: Rules, trace: Sequence[Request]) -> None:
        super().__init__(machine, rules, trace)
        self._share = PrefixShare(machine.gpu_blocks)
        self._hits = dict[int, Hit]()  # by the id of a run

    def _count(self, run: Run, reusable: Sequence[int]) -> None:
        super()._count(run, reusable)
        self._hits[id(run)] = Hit(run.hit, run.on_gpu, self._share.uses)

    def _end(self, run: Run) -> None:
        super()._end(run)
        gpu, manager, keys = self._gpu, self._manager, run.request.keys
        hit = self._hits.pop(id(run), NO_HIT)
        whole = manager.lazy or not any(gpu.next_out(HEADS_FRONT_BLOCKS))
        tail = self._share.ended(keys, hit, len(gpu.free), manager.num_slots, whole)
        blocks = [gpu.block_of(key) for key in tail if manager.lookup(key)]
        gpu.hand_out_first(block for block in blocks if block is not None)


MODELS = dict(zip(KEPT, (Model, HeadsModel)))


def replayed(job: tuple[str, str, int, float]) -> dict[str, Any]:
    """Figures of one trace, seed and way of keeping prefixes."""
    name, kept, seed, seconds = job
    machine = Machine()
    trace = workloads.generate(name, seconds, seed)
    found = MODELS[kept](machine, sides.SIDES[DEFAULT].rules(machine), trace).run()
    return {
        "trace": name,
        "kept": kept,
        "seed": seed,
        "on_gpu": found.hits_gpu,
        "hits": found.hits_gpu + found.hits_tier,
        "loaded": found.loaded,
        "again": found.again,
        "first_token_mean": round(statistics.fmean(found.first_token), 4),
    }


def measure(seconds: float) -> dict[str, Any]:
    """All replays, on as many cores as there are, with a line on stderr for each."""
    names = (*workloads.IN_TURNS, *workloads.WORKLOADS)
    jobs = [(name, kept, seed, seconds) for name in names for seed in SEEDS for kept in KEPT]
    return parallel.measured(replayed, jobs, seconds)


def page(document: dict[str, Any]) -> str:
    """Share of hits on the GPU, and what is loaded and awaited beside whole prefixes."""
    rows = [["", "hits on the GPU, %", "with heads, %", "loaded", "first token, mean"]]
    for name, (words, _) in {**workloads.IN_TURNS, **workloads.WORKLOADS}.items():
        found = {kept: _rows(document, name, kept) for kept in KEPT}
        on_gpu = [
            f"{100 * sum(r['on_gpu'] for r in rows) / sum(r['hits'] for r in rows):.0f}"
            for rows in found.values()
        ]
        beside = [
            change(by_seed(found["auto"], figure), by_seed(found["whole"], figure), places=0)
            for figure in ("loaded", "first_token_mean")
        ]
        rows.append([words, *on_gpu, *beside])
    made = document["machine"]
    ran = (
        f"Commit {made['commit']}, {made['date'][:10]}: `{made['command']}`, three seeds, in "
        "brackets the least and the most of one."
    )
    return f"{table(rows)}\n\n{ran}"


def _rows(document: dict[str, Any], name: str, kept: str) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if (row["trace"], row["kept"]) == (name, kept)]


def main() -> int:
    """Measure and write."""
    return parallel.write(__doc__, RESULTS, measure)
