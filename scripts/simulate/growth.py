"""What the first engine on a machine keeps while its tier grows, beside a tier that evicts nothing.

Every generated trace is replayed with a tier whose slots become usable one after the other until
its end, or until a quarter of it. Writes docs/measured/growth.json, and `page` makes the table of
docs/policies.md from that.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from kvoffload_patch.plan import TransferResult
from kvoffload_patch.tier.exclusive import blocks_ahead
from kvoffload_patch.tier.policies.arc import ArcPolicy
from scripts import ROOT
from scripts.bench.common import table
from scripts.simulate import parallel, workloads
from scripts.simulate.bus import Bus
from scripts.simulate.gpu import GpuPool
from scripts.simulate.model import Figures, Machine, Model
from scripts.simulate.rules import Rules
from scripts.simulate.spread import by_seed, change
from scripts.simulate.trace import Request

RESULTS = ROOT / "docs" / "measured" / "growth.json"
SEEDS = (0, 1, 2)
TRACES = [name for name in workloads.WORKLOADS if name != "takeover"]  # it fits
SHARES = (1.0, 0.25)
STORES = ("eager", "auto")
FIRST_SLOTS = 16
FIGURES = {"again": "tokens recomputed", "first_token_mean": "first token, mean"}


class Waits(Rules):
    """What finds no room waits for slots that are to come, and is lost with its GPU block."""

    def may_overwrite(self, gpu: GpuPool, count: int) -> bool:
        return True

    def step(self, gpu: GpuPool, idle: Sequence[int]) -> None:
        pass


SIDES: dict[str, type[Rules]] = {"waits": Waits, "evicts": Rules}


class GrowingBus(Bus):
    """Its results say how many slots are usable by then.

    Args:
        slots: of the tier in the end.
        seconds: until all of them are usable.
    """

    def __init__(self, machine: Machine, slots: int, seconds: float) -> None:
        block_bytes = machine.token_bytes * machine.block_tokens
        super().__init__(block_bytes, machine.load_gbs, machine.store_gbs)
        self._slots, self._seconds = slots, seconds

    def result(self, now: float) -> TransferResult:
        """What is done, and the slots."""
        usable = min(self._slots, max(FIRST_SLOTS, int(self._slots * now / self._seconds)))
        growing = usable < self._slots
        return super().result(now)._replace(num_slots=usable, growing=growing)


class GrowingModel(Model):
    """A replay whose tier grows for some seconds from the first request on."""

    def __init__(
        self, machine: Machine, rules: Rules, trace: Sequence[Request], seconds: float
    ) -> None:
        super().__init__(machine, rules, trace)
        self._bus = GrowingBus(machine, machine.cpu_blocks, seconds)


def figures(
    name: str, side: str, store: str, seed: int, seconds: float, growing_s: float
) -> Figures:
    """One trace, replayed."""
    machine = Machine()
    step_blocks = -(-machine.step_tokens // machine.block_tokens)
    ahead = blocks_ahead(machine.gpu_blocks, step_blocks)
    gpu = machine.gpu_blocks
    rules = SIDES[side](FIRST_SLOTS, ArcPolicy, store, ahead, growing=True, gpu_blocks=gpu)
    trace = workloads.generate(name, seconds, seed)
    return GrowingModel(machine, rules, trace, growing_s).run()


def replayed(job: tuple[str, str, str, int, float, float]) -> dict[str, Any]:
    """The row of a replay."""
    name, side, store, seed, seconds, share = job
    found = figures(name, side, store, seed, seconds, share * seconds)
    return {
        "trace": name,
        "side": side,
        "store": store,
        "seed": seed,
        "share": share,
        "again": found.again,
        "stored": found.stored,
        "first_token_mean": round(statistics.fmean(found.first_token), 4),
    }


def measure(seconds: float, seeds: Sequence[int], stores: Sequence[str]) -> dict[str, Any]:
    """All replays, on as many cores as there are, with a line on stderr for each."""
    jobs = [
        (name, side, store, seed, seconds, share)
        for share in SHARES
        for name in TRACES
        for store in stores
        for seed in seeds
        for side in SIDES
    ]
    return parallel.measured(replayed, jobs, seconds)


def page(document: dict[str, Any]) -> str:
    """Tokens recomputed, and the mean first token, beside a tier that evicts nothing meanwhile."""
    names, whole = list(TRACES), document["seconds"]
    rows = [["beside a tier that evicts nothing while it grows", *names]]
    for share in SHARES:
        for store in STORES:
            for figure, words in FIGURES.items():
                title = f"{store}, grows for {share * whole:.0f} s of {whole:.0f}: {words}"
                cells = [_beside(document, trace, store, share, figure) for trace in names]
                rows.append([title, *cells])
    made = document["machine"]
    ran = (
        f"Commit {made['commit']}, {made['date'][:10]}: `{made['command']}`, three seeds, in "
        "brackets the least and the most of one."
    )
    return f"{table(rows)}\n\n{ran}"


def _beside(document: dict[str, Any], trace: str, store: str, share: float, figure: str) -> str:
    def seeds(side: str) -> list[float]:
        wanted = trace, store, share, side
        found = [
            row
            for row in document["rows"]
            if (row["trace"], row["store"], row["share"], row["side"]) == wanted
        ]
        return by_seed(found, figure)

    return change(seeds("evicts"), seeds("waits"), places=0)


def main() -> int:
    """Measure and write."""
    return parallel.write(__doc__, RESULTS, lambda seconds: measure(seconds, SEEDS, STORES))
