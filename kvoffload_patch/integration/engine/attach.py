"""Attaching a tier to a started engine: all of it, or none of it.

What can fail on the engine's side is done once for nothing before any rank takes memory. Whatever
is raised becomes a refusal in one sentence, and what was taken is given back.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from kvoffload_patch import launch_token
from kvoffload_patch.config import VARIABLES, ConfigError, Settings, as_given, read
from kvoffload_patch.integration.engine import control
from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView
from kvoffload_patch.integration.engine.blocks.weights import can_keep
from kvoffload_patch.integration.engine.breaker import Breaker
from kvoffload_patch.integration.engine.elastic_tier import ElasticTier
from kvoffload_patch.integration.engine.eligibility import check_eligible
from kvoffload_patch.integration.engine.ranks.ending import ending
from kvoffload_patch.integration.engine.ranks.workers import RankGroup
from kvoffload_patch.integration.engine.reports import metrics
from kvoffload_patch.integration.engine.requests.inline import in_words
from kvoffload_patch.integration.engine.tier import SchedulerTier
from kvoffload_patch.integration.errors import PromiseBroken, TierNotNeeded, TierRefused
from kvoffload_patch.integration.install import keep_installed, step_hooks
from kvoffload_patch.integration.kvcached import is_elastic
from kvoffload_patch.integration.metrics import NOT_NEEDED, REFUSED
from kvoffload_patch.integration.protocol import (
    TIER,
    attached,
    engine_bytes,
    is_told_apart,
    num_engines,
)
from kvoffload_patch.patching import ObjectHooks, PatchRefused
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies import policy_named
from kvoffload_patch.tier.policies.own import PolicyRefused

logger = logging.getLogger("vllm.kvoffload_patch")

_WITH, _WITHOUT = "the CPU tier serves on", "the engine serves without the CPU tier"


def attach(engine_core: Any, vllm_config: Any) -> None:
    """Give an engine core, its scheduler and its workers a CPU tier, unless they have one.

    Raises:
        TierRefused: there can be no tier here, and KVOFFLOAD_STRICT is on. With it off that is a
            line in the log, whatever has failed, and the engine is as vLLM made it; unless a rank
            may answer late, which vLLM would take for the answer to a call of its own, or what
            was changed of vLLM's objects could not be undone.
    """
    said = ""
    try:
        said = keep_installed()
        scheduler = getattr(engine_core, "scheduler", None)
        if scheduler is not None and attached(scheduler) is not None:
            return
        _attach(engine_core, vllm_config, said)
    except TierNotNeeded as reason:
        _told("the log line", _WITHOUT, logger.warning, "kvoffload_patch: %s", reason)
        _told("reporting", _WITHOUT, metrics.tell_off, engine_core, NOT_NEEDED, str(reason))
    except Exception as error:
        refusal = as_given(_sentence(error))
        if _is_strict() or isinstance(error, PromiseBroken):
            text = f"kvoffload_patch: {refusal}"
            _told("telling the launch", "the engine is refused", launch_token.tell, text)
            raise TierRefused(text) from error
        if not said:
            text = "kvoffload_patch: %s Serving without the CPU tier."
            _told("the log line", _WITHOUT, logger.error, text, refusal)
        _told("reporting", _WITHOUT, metrics.tell_off, engine_core, REFUSED, refusal)
    _confirm(engine_core)


def refuse_v0() -> None:
    """An engine is about to start that is not V1.

    Raises:
        TierRefused: KVOFFLOAD_STRICT is on.
    """
    text = (
        "kvoffload_patch: expected vLLM's V1 engine, found V0 chosen; set VLLM_USE_V1=1, or "
        "KVOFFLOAD_STRICT=0 to serve without the CPU tier."
    )
    if _is_strict():
        raise TierRefused(text)
    logger.error("%s", text)


def detach(engine_core: Any) -> None:
    """The engine core shuts down: end the copies, give memory back, take the hooks off."""
    try:
        control.close_socket(engine_core)
    finally:
        scheduler = getattr(engine_core, "scheduler", None)
        breaker = None if scheduler is None else attached(scheduler)
        if breaker is not None:
            breaker.close()


def connect(
    scheduler: Any,
    hooks: ObjectHooks,
    manager: OffloadManager,
    ranks: RankGroup,
    settings: Settings,
    now: Callable[[], float] = time.monotonic,
) -> Breaker:
    """Make a scheduler's tier and set its hooks; on any exception nothing of them stays.

    Args:
        scheduler: a `vllm.v1.core.sched.scheduler.Scheduler`.
        hooks: of the scheduler and its pool.
        manager: slots and tickets.
        ranks: open.
        settings: of the process.
        now: the tier's clock, in seconds.
    """
    view = SchedulerView(scheduler)
    try:
        if view.prefix.experts is not None:  # before the hooks, which `restore` leaves on
            view.prefix.experts.keep(ranks.num_slots)
        made = ElasticTier if view.adapter.elastic else SchedulerTier
        tier = made(view, manager, ranks, settings, now)
        breaker = Breaker(view, manager, tier, ranks, hooks)
        hooks.install(breaker)
    except BaseException:
        view.restore()
        raise
    setattr(scheduler, TIER, breaker)
    return breaker


def _check_wipe(ranks: RankGroup, settings: Settings) -> None:
    """Slots are overwritten behind the steps that were sent before, which may load from them."""
    if settings.wipe and ranks.beside_steps:
        raise TierRefused(
            "expected workers that overwrite slots in order with steps, which KVOFFLOAD_WIPE=1 "
            "needs, found Ray's compiled graph, where they carry out calls beside steps; set "
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1 (from vLLM 0.20 on), or unset KVOFFLOAD_WIPE."
        )


def _attach(engine_core: Any, vllm_config: Any, refused: str) -> None:
    ranks = RankGroup(engine_core.model_executor, ending(engine_core))
    breaker: Breaker | None = None
    try:
        if refused:  # by an import since `EngineCore.__init__` was called, which was hooked then
            raise TierRefused(refused)
        scheduler = engine_core.scheduler
        _check_scheduler(scheduler)
        settings = _chosen(Settings.from_env(), scheduler.kv_cache_manager.block_pool)
        unverified = check_eligible(vllm_config, scheduler)
        _check_wipe(ranks, settings)
        hooks = step_hooks(scheduler)
        cpu_bytes = engine_bytes(vllm_config, settings)
        _rehearse(scheduler, hooks, settings)
        how = settings.copy_backend, num_engines(vllm_config), settings.integrity
        ranks.open(cpu_bytes, *how, by_layer=settings.load_by_layer)
        manager = OffloadManager(
            ranks.num_usable,
            policy_named(settings.eviction),
            ranks.growing,
            settings.store,
            settings.store_min_uses,
            len(scheduler.kv_cache_manager.block_pool.blocks),
        )
        breaker = connect(scheduler, hooks, manager, ranks, settings)
        breaker.steps_under_way = _steps_under_way(engine_core)
        if can_keep(vllm_config, scheduler, settings):
            breaker.tier.weights.watch()
        _told("the log line", _WITH, _tell, ranks, settings, unverified)
        _told("the log line", _WITH, _tell_whole, ranks, cpu_bytes, vllm_config)
        _show(engine_core, breaker, manager, ranks, settings, unverified)
    except BaseException as error:
        _take_back(engine_core, breaker, ranks, error)
        raise


def _show(
    engine_core: Any,
    breaker: Breaker,
    manager: OffloadManager,
    ranks: RankGroup,
    settings: Settings,
    unverified: Sequence[str],
) -> None:
    """Report the tier to /metrics, and answer on its control socket."""
    about = {"load_mode": settings.load_mode, "eviction": settings.eviction}
    about |= {"store": settings.store, "integrity": settings.integrity, "copies": ranks.copies}
    shown = engine_core, breaker, manager
    _told("reporting", _WITH, metrics.begin, *shown, ranks.block_bytes, about)
    if settings.control:
        _told("the control socket", _WITH, control.listen, *shown, ranks, unverified)


def _told(what: str, outcome: str, tell: Callable[..., object], *args: Any) -> None:
    """Call what only tells of a tier or a refusal: that it fails is said, and decides nothing."""
    try:
        tell(*args)
    except Exception as error:  # noqa: BLE001 - what was decided stands
        with suppress(Exception):  # the log may be what fails
            text = "kvoffload_patch: %s failed (%s: %s); %s."
            logger.warning(text, what, type(error).__name__, error, outcome)


def _confirm(engine_core: Any) -> None:
    """Tell the launch that this engine has said whether it has the tier."""
    try:
        outcome = "the engine serves all the same"
        _told("telling the launch", outcome, launch_token.confirm, launch_token.ATTACHED)
    except BaseException:  # a key: who has the engine in the own process goes on without it
        detach(engine_core)
        raise


def _take_back(
    engine_core: Any, breaker: Breaker | None, ranks: RankGroup, why: BaseException
) -> None:
    """Undo all of `_attach`, the last first; what fails keeps nothing else from being undone."""
    try:
        if breaker is not None:
            try:
                _told("the control socket", _WITHOUT, control.close_socket, engine_core)
            finally:
                _withdraw(breaker)
    finally:
        _give_back(ranks, why)


def _withdraw(breaker: Breaker) -> None:
    """Raises PromiseBroken if hooks or values of the tier may be left on vLLM's objects."""
    try:
        breaker.withdraw()
    except Exception as error:
        raise PromiseBroken(
            "expected vLLM's objects to be as before once the CPU tier is taken back, found "
            f"{type(error).__name__} ({' '.join(str(error).split())}) while that was undone; "
            "report it, and set KVOFFLOAD_DISABLE=1 to serve without the CPU tier."
        ) from error


def _give_back(ranks: RankGroup, why: BaseException) -> None:
    """Raises PromiseBroken if a rank may answer a call of ours once vLLM waits for another."""
    ranks.give_back()
    if ranks.silent and not ranks.answers_apart and isinstance(why, Exception):
        raise PromiseBroken(
            "expected every worker to answer while the CPU tier is attached, found one that has "
            "not in time, whose late answer vLLM would take for that to a call of its own; see the "
            "workers' own messages, or set KVOFFLOAD_DISABLE=1 to serve without the CPU tier."
        )


def _tell(ranks: RankGroup, settings: Settings, unverified: Sequence[str]) -> None:
    """Say what the tier is, and what of the engine nobody has run with one."""
    compared = in_words(settings.integrity, settings.load_mode) if ranks.compares else ""
    logger.info(
        "KV offload: CPU tier of %d blocks (%s), %d of them usable so far, "
        "loads %s, %.3f ms a block; %s%s",
        ranks.num_slots, ranks.size, ranks.num_usable,
        settings.load_mode, ranks.load_ms_per_block, ranks.copies, compared,
    )  # fmt: skip
    for doubt in unverified:
        logger.warning(
            "kvoffload_patch: KVOFFLOAD_ALLOW_UNVERIFIED uses the tier where it was not run: %s; "
            "compare its answers with those without it.", doubt,
        )  # fmt: skip


def _tell_whole(ranks: RankGroup, cpu_bytes: int | None, vllm_config: Any) -> None:
    """Say if engines of one server have each taken what is meant for all of them."""
    if cpu_bytes is None or not is_told_apart(vllm_config):
        return
    text = (
        "kvoffload_patch: expected one engine, found several data-parallel ones, each of which "
        "vLLM tells that it is the only one, so each has taken the whole CPU tier (%s); divide "
        "KVOFFLOAD_CPU_GIB by their number."
    )
    logger.warning(as_given(text), ranks.size)


def _steps_under_way(engine_core: Any) -> Callable[[], int]:
    """As `Breaker.steps_under_way`: without a queue, a step ends before the next one begins."""
    queue = engine_core.batch_queue
    return int if queue is None else partial(len, queue)


def _chosen(settings: Settings, pool: Any) -> Settings:
    """The settings; never lazy over a pool whose blocks lose their memory once nobody uses them.

    Nor do loads come by layer there: nobody has run that.
    """
    if not is_elastic(pool):
        return settings
    store = "eager" if settings.store == "auto" else settings.store
    return replace(settings, store=store, load_by_layer=False)


def _rehearse(scheduler: Any, hooks: ObjectHooks, settings: Settings) -> None:
    """Connect a tier that no rank takes part in, and take it off again."""
    manager = OffloadManager(1, policy_named(settings.eviction), store=settings.store)
    _withdraw(connect(scheduler, hooks, manager, RankGroup(None), settings))


def _check_scheduler(scheduler: Any) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    if not isinstance(scheduler, Scheduler):
        raise TierRefused(
            f"expected a scheduler derived from vLLM's own, found {type(scheduler).__name__}; "
            "set KVOFFLOAD_STRICT=0 to serve without the CPU tier."
        )


def _is_strict() -> bool:
    """Whether a refusal aborts, also where another setting cannot be read."""
    try:
        return bool(read(VARIABLES["KVOFFLOAD_STRICT"], os.environ))
    except ConfigError:
        return True


def _sentence(error: Exception) -> str:
    if isinstance(error, (TierRefused, PromiseBroken, PatchRefused, PolicyRefused)):
        return str(error)
    return (
        f"expected the CPU tier to be attached, found {type(error).__name__} "
        f"({' '.join(str(error).split())}); report it, and set KVOFFLOAD_STRICT=0 to serve without "
        "the CPU tier."
    )
