"""Attaching a tier to a started engine: all of it, or none of it."""

from __future__ import annotations

import logging
from typing import Any

from kvoffload_patch import launch_token
from kvoffload_patch.config import GIB, Settings
from kvoffload_patch.integration.engine.eligibility import check_eligible
from kvoffload_patch.integration.engine.tier import SchedulerTier
from kvoffload_patch.integration.engine.vllm_scheduler import SchedulerView
from kvoffload_patch.integration.engine.workers import RankGroup
from kvoffload_patch.integration.errors import TierNotNeeded, TierRefused
from kvoffload_patch.integration.install import step_hooks
from kvoffload_patch.integration.protocol import TIER, attached, engine_bytes
from kvoffload_patch.patching import ObjectHooks, PatchRefused
from kvoffload_patch.tier.manager import OffloadManager

HOOKS = "_kvoffload_hooks"  # on Scheduler

logger = logging.getLogger("vllm.kvoffload_patch")


def attach(engine_core: Any, vllm_config: Any) -> None:
    """Give an engine core, its scheduler and its workers a CPU tier.

    Raises:
        TierRefused: the tier cannot be right here, and KVOFFLOAD_STRICT is on.
    """
    settings = Settings.from_env()
    try:
        _attach(engine_core, vllm_config, settings)
    except TierNotNeeded as reason:
        logger.warning("kvoffload_patch: %s", reason)
        RankGroup(engine_core.model_executor).give_back()
    except TierRefused as refusal:
        if refusal.__cause__ is None:  # else a worker does not answer
            RankGroup(engine_core.model_executor).give_back()
        if settings.strict:
            raise TierRefused(f"kvoffload_patch: {refusal}") from refusal.__cause__
        logger.error("kvoffload_patch: %s Serving without the CPU tier.", refusal)
    launch_token.confirm(launch_token.ATTACHED)


def refuse_v0() -> None:
    """An engine is about to start that is not V1.

    Raises:
        TierRefused: KVOFFLOAD_STRICT is on.
    """
    text = (
        "kvoffload_patch: expected vLLM's V1 engine, found V0 chosen; set VLLM_USE_V1=1, or "
        "KVOFFLOAD_STRICT=0 to serve without the CPU tier."
    )
    if Settings.from_env().strict:
        raise TierRefused(text)
    logger.error("%s", text)


def _attach(engine_core: Any, vllm_config: Any, settings: Settings) -> None:
    scheduler = engine_core.scheduler
    if attached(scheduler) is not None:
        return
    _check_scheduler(scheduler)
    check_eligible(vllm_config, scheduler)
    hooks = _check_functions(scheduler)
    cpu_bytes = engine_bytes(vllm_config, settings)
    ranks = RankGroup(engine_core.model_executor)
    ranks.open(cpu_bytes, settings.copy_backend, settings.canary_fault_rank)
    manager = OffloadManager(ranks.num_usable, growing=ranks.growing)
    view = SchedulerView(scheduler)
    tier = SchedulerTier(view, manager, ranks, settings)
    hooks.install(tier)
    setattr(scheduler, HOOKS, hooks)
    setattr(scheduler, TIER, tier)
    logger.info(
        "KV offload: CPU tier of %d blocks (%.2f GiB over all ranks), %d of them usable so far, "
        "loads %s, %.3f ms a block; %s",
        ranks.num_slots, cpu_bytes / GIB, ranks.num_usable,
        settings.load_mode, ranks.load_ms_per_block, ranks.copies,
    )  # fmt: skip


def _check_scheduler(scheduler: Any) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    if not isinstance(scheduler, Scheduler):
        raise TierRefused(
            f"expected a scheduler derived from vLLM's own, found {type(scheduler).__name__}; "
            "set KVOFFLOAD_STRICT=0 to serve without the CPU tier."
        )


def _check_functions(scheduler: Any) -> ObjectHooks:
    try:
        return step_hooks(scheduler)
    except PatchRefused as refusal:
        raise TierRefused(str(refusal)) from None


def detach(engine_core: Any) -> None:
    """The engine core shuts down."""
    scheduler = getattr(engine_core, "scheduler", None)
    if scheduler is None:
        return  # it never came up
    tier = attached(scheduler)
    if tier is not None:
        scheduler.__dict__.pop(HOOKS).remove()
        delattr(scheduler, TIER)
        tier.close()
