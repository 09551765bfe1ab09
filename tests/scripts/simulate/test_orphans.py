"""Which blocks of a tier no request can hit, worked out by hand."""

from __future__ import annotations

from collections.abc import Iterable

from scripts.simulate.model import Machine, Model
from scripts.simulate.orphans import EVERY_S, Orphans
from scripts.simulate.rules import NoTier, Rules
from scripts.simulate.trace import Request
from scripts.simulate.workloads import generate

# Two prompts that part behind their second block.
TRACE = Request(0.0, 9, 2, (1, 2, 3, 4)), Request(1.0, 9, 2, (1, 2, 5))


def share(tier: Iterable[int], gpu: Iterable[int]) -> float:
    orphans = Orphans(TRACE)
    orphans.look(0.0, set(tier).__contains__, set(gpu).__contains__)
    return orphans.share


def test_a_block_rests_on_all_before_it_wherever_they_are() -> None:
    assert share(tier=[1, 2, 3], gpu=[]) == 0
    assert share(tier=[3, 5], gpu=[1, 2]) == 0
    assert share(tier=[2, 3, 5], gpu=[]) == 1
    assert share(tier=[1, 4, 5], gpu=[3]) == 2 / 3, "the second is nowhere"
    assert share(tier=[1, 2, 4, 5], gpu=[]) == 1 / 4, "the third is nowhere"
    assert share(tier=[], gpu=[2]) == 0


def test_looks_are_far_enough_apart_and_summed_up() -> None:
    orphans = Orphans(TRACE)
    for now, tier in ((0.0, {1, 2}), (EVERY_S - 1, {3}), (EVERY_S, {1, 3})):
        orphans.look(now, tier.__contains__, set[int]().__contains__)
    assert orphans.share == 1 / 4


class HeadFirst(Rules):
    """Forgets the block that a request began with, when it has ended."""

    def ended(self, run: object) -> None:
        self.manager.discard(run.request.keys[0])  # type: ignore[attr-defined]


def test_a_replay_finds_what_lost_its_head() -> None:
    machine = Machine(gpu_blocks=120, cpu_blocks=240)
    trace = generate("documents", seconds=200)
    assert Model(machine, HeadFirst(240), trace).run().orphans > 0.3
    assert Model(machine, Rules(240), trace).run().orphans < 0.1
    assert Model(machine, NoTier(), trace).run().orphans == 0
