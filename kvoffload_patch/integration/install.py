"""Deciding and arming for the vLLM that is installed; imports nothing of vLLM.

vllm-ascend, where it is installed, has a table of its own: it is armed with vLLM, or neither is.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from kvoffload_patch.config import Settings
from kvoffload_patch.integration import kvcached
from kvoffload_patch.integration.patch_table.ascend import POINTS as ASCEND_POINTS
from kvoffload_patch.integration.patch_table.ascend import VLLM_ASCEND
from kvoffload_patch.integration.patch_table.points import POINTS, VLLM
from kvoffload_patch.integration.patch_table.verified import SUPPORTED_VLLM
from kvoffload_patch.patching import (
    Decision,
    HostNotFound,
    ObjectHooks,
    PatchRefused,
    PatchSet,
    UnsupportedVersion,
    decide,
    installed_version,
    load_wrapt,
    release_of,
)

logger = logging.getLogger("vllm.kvoffload_patch")


def arm() -> None:
    """Decide for all processes' points at once, and install each when its module is imported.

    Raises:
        PatchRefused: vLLM is not one that the table knows; nothing was touched.
    """
    global _patches
    decisions = _decide(Settings.from_env())
    patches: tuple[PatchSet, ...] = ()
    try:
        for decision in decisions:
            patches += (PatchSet(decision),)
            patches[-1].arm()
    except PatchRefused:
        for armed in patches[:-1]:
            armed.remove()
        raise
    _patches = patches
    for decision in decisions:
        if decision.doubts:
            logger.warning("kvoffload_patch: %s", warning(decision.doubts, decision.host.name))


def warning(doubts: Sequence[str], name: str = VLLM.name) -> str:
    """What is said of a vLLM that is patched although it was not verified."""
    more = f" (and {len(doubts) - 1} more)" if len(doubts) > 1 else ""
    return f"KVOFFLOAD_ALLOW_UNVERIFIED patches a {name} that was not verified: {doubts[0]}{more}."


def disarm() -> None:
    """Put vLLM's own objects back."""
    for each in _patches:
        each.remove()


def step_hooks(scheduler: Any) -> ObjectHooks:
    """The hooks of one scheduler and its block pool, checked and not yet set.

    Raises:
        PatchRefused: their functions are not those that the table knows.
    """
    decision = _patches[0].decision if _patches else _decide(Settings.from_env())[0]
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    owners = {"Scheduler": scheduler, "KVCacheManager": manager, **kvcached.owners_of(pool)}
    return ObjectHooks(kvcached.with_pool(decision, pool), owners)


def describe(settings: Settings | None = None) -> dict[str, Any]:
    """What `arm` would do: release, supported range, points, doubts, and the verdict."""
    report: dict[str, Any] = {
        "release": None,
        "supported": SUPPORTED_VLLM,
        "points": [],
        "doubts": [],
    }
    try:
        settings = Settings.from_env() if settings is None else settings
        report["release"] = _version(settings)
        decisions = _decide(settings)
        load_wrapt()  # comparing does without it, installing does not
    except PatchRefused as refusal:
        return {**report, "verdict": str(refusal)}
    listed = [
        {
            **{key: getattr(p, key) for key in ("name", "module", "attribute")},
            "wrapped": bool(p.hook),
        }
        for decision in decisions
        for p in decision.points
    ]
    doubts = [text for decision in decisions for text in decision.doubts]
    return {**report, "points": listed, "doubts": doubts, "verdict": "ok"}


def installed_attributes() -> set[str]:
    """Full names of the attributes patched in this process."""
    points = [point for each in _patches for point in each.status()["points"]]
    return {f"{p['module']}.{p['attribute']}" for p in points if p["installed"]}


def older_than(release: str) -> bool:
    """Whether the installed vLLM is older than a release."""
    return release_of(_version(Settings.from_env())) < release_of(release)


def release_in_use() -> str:
    """The installed vLLM's release, or the one named in its place, without a local part."""
    return str(release_of(_version(Settings.from_env())))


_patches: tuple[PatchSet, ...] = ()  # of vLLM, and of vllm-ascend where that is installed


def _version(settings: Settings) -> str:
    return settings.vllm_version or installed_version(VLLM)


def _decide(settings: Settings) -> tuple[Decision, ...]:
    """Of vLLM, and of vllm-ascend where it is installed.

    Raises:
        PatchRefused: one of them is not what its table knows, or they are not of one release.
    """
    own = _decide_vllm(settings)
    try:
        version = installed_version(VLLM_ASCEND)
    except HostNotFound:
        return (own,)
    allowed = settings.allow_unverified
    ascend = decide(VLLM_ASCEND, ASCEND_POINTS, version, allow_unverified=allowed)
    if release_of(version) != release_of(own.version):
        raise UnsupportedVersion(
            f"{ascend.label} is made for vLLM {release_of(version)}, found vLLM {own.version}; "
            f"install both of one release, or {VLLM.remedy}."
        )
    return own, ascend


def _decide_vllm(settings: Settings) -> Decision:
    host = VLLM
    if assumed := settings.vllm_version:
        remedy = f"unset KVOFFLOAD_VLLM_VERSION, which says {assumed}, or {VLLM.remedy}"
        host = dataclasses.replace(VLLM, remedy=remedy)
    return decide(host, POINTS, _version(settings), allow_unverified=settings.allow_unverified)
