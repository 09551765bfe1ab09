"""Mechanisms that exist for speed, and how each is switched off in an engine that runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

# What is replaced: owner, name and value.
Change = tuple[Any, str, Any]
Changes = tuple[Change, ...]


def _last_block() -> Changes:
    from kvoffload_patch.integration.engine.requests.full_prompt import FullPromptHits

    return ((FullPromptHits, "load", lambda self, *args, **kwargs: None),)


def _joining_early() -> Changes:
    from kvoffload_patch.integration.engine.tier import SchedulerTier

    return ((SchedulerTier, "_may_wait_ms", lambda self: 0.0),)


def _joining_into_a_stall() -> Changes:
    from kvoffload_patch.integration.engine.tier import SchedulerTier

    def free_ms_only(self: Any) -> float:
        return float(self.pace.free_ms()) if self._promptly else 0.0

    return ((SchedulerTier, "_may_wait_ms", free_ms_only),)


def _loads_within_a_step() -> Changes:
    """A load is parked, and its request joins a step that begins when the load is over."""
    from kvoffload_patch.integration.engine.requests.admission import Admission
    from kvoffload_patch.integration.engine.requests.pace import Pace

    parked = (Admission, "_inline", lambda self, *args: False)
    whole = (Pace, "hidden_ms", lambda self, num_blocks: 0.0)
    return parked, whole, *_joining_into_a_stall()


def _joins_before_loads_are_over() -> Changes:
    """As KVOFFLOAD_LOAD_MODE=parked: a request joins a step that is scheduled after its load."""
    return _loads_within_a_step()[0], *_joining_early()


def _loads_by_layer() -> Changes:
    """The engine must have been started with KVOFFLOAD_LOAD_BY_LAYER=1, or there is nothing."""
    from kvoffload_patch.integration.engine.requests.pace import Pace
    from kvoffload_patch.integration.worker.layer_gate import LayerGate

    not_hidden = (Pace, "hidden_ms", lambda self, num_blocks: 0.0)
    return not_hidden, (LayerGate, "passes", lambda self, step: False)


def _stores_of_several_steps() -> Changes:
    from kvoffload_patch.integration.engine.blocks.store_choice import StoreChoice

    return ((StoreChoice, "can_wait", lambda self, num_blocks: False),)


def _stores_by_the_step() -> Changes:
    """Of more slices than 2; the thread enqueues the others."""
    from kvoffload_patch.transfer import engine

    return ((engine, "STEP_STORE_SLICES", 2),)


def _heads_of_prefixes() -> Changes:
    """The GPU keeps whole prefixes; what they are used for is counted all the same."""
    from kvoffload_patch.integration.engine.blocks.gpu_heads import GpuHeads

    ended = GpuHeads.ended
    return ((GpuHeads, "ended", lambda self, *about: ended(self, *about[:-1], True)),)


def _tier() -> Changes:
    """Paused: its hooks are called, and it neither loads nor stores."""
    from kvoffload_patch.integration.engine.tier import SchedulerTier

    tiers = [found for found in gc.get_objects() if isinstance(found, SchedulerTier)]
    return tuple((tier, "paused", True) for tier in tiers)


_CHANGES: dict[str, Callable[[], Changes]] = {
    "last block loaded": _last_block,
    "joining early": _joining_early,
    "joining into a stall": _joining_into_a_stall,
    "loads by layer": _loads_by_layer,
    "loads within a step": _loads_within_a_step,
    "joins before loads are over": _joins_before_loads_are_over,
    "stores of several steps": _stores_of_several_steps,
    "stores by the step": _stores_by_the_step,
    "heads of prefixes": _heads_of_prefixes,
    "the tier": _tier,
}
MECHANISMS = ("nothing", *_CHANGES)


def switch_off(worker: Any, mechanism: str) -> str:
    """In the engine's process: switch one mechanism off, and every other one on."""
    import kvoffload_patch

    undo: list[Change] = kvoffload_patch.__dict__.setdefault("_bench_undo", [])
    while undo:
        setattr(*undo.pop())
    if mechanism != "nothing":
        for owner, name, value in _CHANGES[mechanism]():
            undo.append((owner, name, vars(owner)[name]))
            setattr(owner, name, value)
    return mechanism
