"""Deciding and arming for the vLLM that is installed; imports nothing of vLLM.

vllm-ascend, where it is installed, has a table of its own: it is armed with vLLM, or neither is.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvoffload_patch.config import Settings, as_given
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

    What cannot be installed by then is raised by that import; with KVOFFLOAD_STRICT off it is a
    line in the log, vLLM is as it was made, and no engine of this process gets a tier.

    Raises:
        PatchRefused: vLLM is not one that the table knows; nothing was touched.
    """
    global _patches
    settings = Settings.from_env()
    decisions = _decide(settings)
    patches = tuple(PatchSet(decision) for decision in decisions)
    said = threading.Lock()  # is taken once, for good
    on_refusal = None if settings.strict else partial(_serve_without, patches, said)
    for each in patches:
        try:
            each.arm(on_refusal)
        except BaseException:
            said.acquire(blocking=False)  # who has called this says it
            for other in patches:
                if other is not each:
                    other.remove()
            raise
    _patches = patches
    for decision in decisions:
        if decision.doubts:
            logger.warning("kvoffload_patch: %s", warning(decision.doubts, decision.host.name))


def _serve_without(
    patches: Sequence[PatchSet], said: threading.Lock, refusal: PatchRefused
) -> None:
    """One of them was refused while a module was imported: so are the others, and children.

    Workers of an engine that is not patched would wait for it with memory taken in advance.
    """
    if not said.acquire(blocking=False):
        return
    os.environ["KVOFFLOAD_DISABLE"] = "1"
    for each in patches:
        each.give_up(refusal)
    logger.error("kvoffload_patch: %s Serving without the CPU tier.", as_given(str(refusal)))


def keep_installed() -> str:
    """A tier is about to use what is installed: no later import takes it off.

    Returns:
        Why no tier can use it, as a sentence that the process has said already; empty if it can.
    """
    return next(filter(None, [each.keep() for each in _patches]), "")


def refusal() -> str:
    """Why an import was refused since `arm`, as a sentence; empty if none was."""
    return next(filter(None, [each.status()["refusal"] for each in _patches]), "")


def warning(doubts: Sequence[str], name: str) -> str:
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


def describe(settings: Settings) -> dict[str, Any]:
    """What `arm` would do: release, supported range, points, doubts, and the verdict."""
    report: dict[str, Any] = {
        "release": None,
        "supported": SUPPORTED_VLLM,
        "points": [],
        "doubts": [],
    }
    try:
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


def installed() -> set[tuple[Any, str]]:
    """Class and attribute of each point that is patched in this process."""
    return {target for each in _patches for target in each.installed()}


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
