"""Deciding and arming for the vLLM that is installed; imports nothing of vLLM."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from kvoffload_patch.config import Settings
from kvoffload_patch.integration.patch_table.points import POINTS, VLLM
from kvoffload_patch.integration.patch_table.verified import SUPPORTED_VLLM
from kvoffload_patch.patching import (
    Decision,
    ObjectHooks,
    PatchRefused,
    PatchSet,
    decide,
    installed_version,
    release_of,
)

logger = logging.getLogger("vllm.kvoffload_patch")


def arm() -> None:
    """Decide for all processes' points at once, and install each when its module is imported.

    Raises:
        PatchRefused: vLLM is not one that the table knows; nothing was touched.
    """
    global _patches
    decision = _decide(Settings.from_env())
    patches = PatchSet(decision)
    patches.arm()
    _patches = patches
    if decision.doubts:
        logger.warning("kvoffload_patch: %s", warning(decision.doubts))


def warning(doubts: Sequence[str]) -> str:
    """What is said of a vLLM that is patched although it was not verified."""
    more = f" (and {len(doubts) - 1} more)" if len(doubts) > 1 else ""
    return f"KVOFFLOAD_ALLOW_UNVERIFIED patches a vLLM that was not verified: {doubts[0]}{more}."


def disarm() -> None:
    """Put vLLM's own objects back."""
    if _patches is not None:
        _patches.remove()


def step_hooks(scheduler: Any) -> ObjectHooks:
    """The hooks of one scheduler and its block pool, checked and not yet set.

    Raises:
        PatchRefused: their functions are not those that the table knows.
    """
    decision = _decide(Settings.from_env()) if _patches is None else _patches.decision
    manager = scheduler.kv_cache_manager
    owners = {"Scheduler": scheduler, "KVCacheManager": manager, "BlockPool": manager.block_pool}
    return ObjectHooks(decision, owners)


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
        decision = _decide(settings)
    except PatchRefused as refusal:
        return {**report, "verdict": str(refusal)}
    listed = [
        {
            **{key: getattr(p, key) for key in ("name", "module", "attribute")},
            "wrapped": bool(p.hook),
        }
        for p in decision.points
    ]
    return {**report, "points": listed, "doubts": list(decision.doubts), "verdict": "ok"}


def installed_attributes() -> set[str]:
    """Full names of the attributes patched in this process."""
    if _patches is None:
        return set()
    points = _patches.status()["points"]
    return {f"{p['module']}.{p['attribute']}" for p in points if p["installed"]}


def older_than(release: str) -> bool:
    """Whether the installed vLLM is older than a release."""
    return release_of(_version(Settings.from_env())) < release_of(release)


def release_in_use() -> str:
    """The installed vLLM's release, or the one named in its place, without a local part."""
    return str(release_of(_version(Settings.from_env())))


_patches: PatchSet | None = None


def _version(settings: Settings) -> str:
    return settings.vllm_version or installed_version(VLLM)


def _decide(settings: Settings) -> Decision:
    host = VLLM
    if assumed := settings.vllm_version:
        remedy = f"unset KVOFFLOAD_VLLM_VERSION, which says {assumed}, or {VLLM.remedy}"
        host = dataclasses.replace(VLLM, remedy=remedy)
    return decide(host, POINTS, _version(settings), allow_unverified=settings.allow_unverified)
