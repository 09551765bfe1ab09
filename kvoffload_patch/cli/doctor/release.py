"""The settings, the installed vLLM, and whether its files match the patch points."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from kvoffload_patch.cli.doctor.findings import Finding
from kvoffload_patch.config import ConfigError, is_enabled
from kvoffload_patch.patching import find_source

# How large the cache of vLLM's CPU build is, in GiB.
_CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"


def switched_off() -> list[Finding]:
    """That the user's own switch keeps the tier away; nothing where it does not."""
    given = os.environ.get("KVOFFLOAD_DISABLE", "")
    try:
        off = not is_enabled({**os.environ, "KVOFFLOAD_ENABLE": "1"})
    except ConfigError:  # the verdict says it
        off = False
    if not off:
        return []
    problem, remedy = "KVOFFLOAD_DISABLE is set, so nothing is patched", "take it out"
    return [Finding("vLLM", "switched off", given, given, problem, remedy, refused=True)]


def check(status: Mapping[str, object]) -> list[Finding]:
    """What `kvoffload_patch.status` says, the verdict being the problem if it is not ok."""
    release, points = status["release"], status["points"]
    doubts = status.get("doubts", [])
    assert isinstance(points, list) and isinstance(doubts, list)
    verdict = str(status["verdict"])
    refused = verdict != "ok"
    wrapped = sum(bool(point.get("wrapped", True)) for point in points)
    return [
        Finding(
            "vLLM",
            "release",
            # Without a table the package could not be imported as a whole.
            str(release or ("not found" if status["supported"] else "not looked for")),
            release,
            problem=verdict if refused else "",
            refused=refused,
        ),
        Finding(
            "vLLM",
            "patch points",
            f"{len(points)} match, {wrapped} of them are wrapped" if points else "not compared",
            len(points),
        ),
        Finding("vLLM", "unverified", "; ".join(doubts) or "nothing", doubts),
        Finding("vLLM", "switch", "on" if status["enabled"] else "off", status["enabled"]),
        *_cpu_cache(str(release)),
    ]


def _cpu_cache(release: str, find: Callable[[str], Path] = find_source) -> list[Finding]:
    """What vLLM's CPU build takes of the memory that the tier is to have; nothing on others."""
    if not release.endswith("+cpu"):
        return []
    given = os.environ.get(_CPU_CACHE)
    if given:
        return [Finding("vLLM", "its own cache", f"{given} GiB", given)]
    try:
        source = find("vllm.v1.worker.cpu_worker").read_text("utf-8")
        takes_a_share = "gpu_memory_utilization" in source
    except OSError:
        takes_a_share = False
    if not takes_a_share:  # a release that takes 4 GiB unless it is told otherwise
        return []
    return [
        Finding(
            "vLLM",
            "its own cache",
            "a share of all memory",
            problem="vLLM's CPU build takes --gpu-memory-utilization of all memory (0.92 unless "
            "given) for itself, and does not start where less than that is free",
            remedy=f"set {_CPU_CACHE} to the GiB that its cache is to have, so that the tier has "
            "the rest",
        )
    ]
