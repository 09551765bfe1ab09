"""What a replay compares: no tier, this package's rules, and those of vLLM's connectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvoffload_patch.tier.policies.arc import ArcPolicy
from kvoffload_patch.tier.policies.lru import LRUPolicy
from scripts.simulate import connectors, rules, tried
from scripts.simulate.model import Machine

OPTIMUM = "optimum"


class Side(NamedTuple):
    """One line of a table: words, and what makes its rules for a machine."""

    words: str
    rules: Callable[[Machine], rules.Rules]


def _near(machine: Machine) -> int:
    """Lazy mode looks at twice the blocks that a step can fill."""
    return 2 * -(-machine.step_tokens // machine.block_tokens)


SIDES = {
    "none": Side("plain vLLM", lambda machine: rules.NoTier()),
    "lru": Side("this tier, LRU", lambda machine: rules.Rules(machine.cpu_blocks, LRUPolicy)),
    "arc": Side("this tier, ARC", lambda machine: rules.Rules(machine.cpu_blocks, ArcPolicy)),
    "s3fifo": Side(
        "this tier, S3-FIFO", lambda machine: rules.Rules(machine.cpu_blocks, tried.S3Fifo)
    ),
    "simple": Side(
        "SimpleCPUOffloadConnector", lambda machine: connectors.SimpleEager(machine.cpu_blocks)
    ),
    "simple-lazy": Side(
        "SimpleCPUOffloadConnector, lazy",
        lambda machine: connectors.SimpleLazy(machine.cpu_blocks, _near(machine)),
    ),
    "offloading": Side(
        "OffloadingConnector, LRU", lambda machine: connectors.OffloadingLru(machine.cpu_blocks)
    ),
    "offloading-arc": Side(
        "OffloadingConnector, ARC", lambda machine: connectors.OffloadingArc(machine.cpu_blocks)
    ),
}
