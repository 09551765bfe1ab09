"""What a replay compares: no tier, this package's rules, and those of vLLM's connectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvoffload_patch.tier.exclusive import blocks_ahead
from kvoffload_patch.tier.policies.adaptive import AdaptivePolicy
from kvoffload_patch.tier.policies.arc import ArcPolicy
from kvoffload_patch.tier.policies.lru import LRUPolicy
from kvoffload_patch.tier.policies.s3fifo import S3FifoPolicy
from scripts.simulate import connectors, rules
from scripts.simulate.model import Machine

OPTIMUM = "optimum"


class Side(NamedTuple):
    """One line of a table: words, and what makes its rules for a machine."""

    words: str
    rules: Callable[[Machine], rules.Rules]


def _step_blocks(machine: Machine) -> int:
    """Blocks that a step can fill."""
    return -(-machine.step_tokens // machine.block_tokens)


def _this(
    eviction: rules.NewPolicy, store: str = "eager", **more: int
) -> Callable[[Machine], rules.Rules]:
    def made(machine: Machine) -> rules.Rules:
        ahead = blocks_ahead(machine.gpu_blocks, _step_blocks(machine))
        weighed = {"gpu_blocks": machine.gpu_blocks, **more}
        return rules.Rules(machine.cpu_blocks, eviction, store, ahead, **weighed)

    return made


SIDES = {
    "none": Side("plain vLLM", lambda machine: rules.NoTier()),
    "lru": Side("this tier, eager, LRU", _this(LRUPolicy)),
    "arc": Side("this tier, eager, ARC", _this(ArcPolicy)),
    "s3fifo": Side("this tier, eager, S3-FIFO", _this(S3FifoPolicy)),
    "adaptive": Side("this tier, eager, adaptive", _this(AdaptivePolicy)),
    "adaptive-prompts": Side(
        "this tier, eager, adaptive, prompts only", _this(AdaptivePolicy, decode=False)
    ),
    "adaptive-twice": Side(
        "this tier, eager, adaptive, second use", _this(AdaptivePolicy, min_uses=2)
    ),
    "auto-lru": Side("this tier, auto, LRU", _this(LRUPolicy, "auto")),
    "auto-arc": Side("this tier, auto, ARC", _this(ArcPolicy, "auto")),
    "lazy-adaptive": Side("this tier, lazy, adaptive", _this(AdaptivePolicy, "lazy")),
    "auto-adaptive": Side("this tier, auto, adaptive", _this(AdaptivePolicy, "auto")),
    "simple": Side(
        "SimpleCPUOffloadConnector", lambda machine: connectors.SimpleEager(machine.cpu_blocks)
    ),
    "simple-lazy": Side(
        "SimpleCPUOffloadConnector, lazy",
        lambda machine: connectors.SimpleLazy(machine.cpu_blocks, 2 * _step_blocks(machine)),
    ),
    "offloading": Side(
        "OffloadingConnector, LRU", lambda machine: connectors.OffloadingLru(machine.cpu_blocks)
    ),
    "offloading-arc": Side(
        "OffloadingConnector, ARC", lambda machine: connectors.OffloadingArc(machine.cpu_blocks)
    ),
}
