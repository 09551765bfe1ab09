"""How much CPU memory there is, and how much of it a tier would take."""

from __future__ import annotations

import sys
from pathlib import Path

from kvoffload_patch.cli.doctor.findings import Finding
from kvoffload_patch.config import GIB, Settings
from kvoffload_patch.memory import (
    AUTO_PARTS,
    RESERVE_BYTES,
    MemoryRefused,
    Room,
    attainable,
    auto_bytes,
    available,
    capacity,
    cgroups,
    check_cpu_bytes,
    shareable,
)


def check(settings: Settings, root: Path = Path("/")) -> list[Finding]:
    """RAM, the limits of the cgroups above, and the size of the tier."""
    return [_machine(root), _cgroup(root), _overcommit(root), _tier(settings, root)]


def _machine(root: Path) -> Finding:
    rooms = available(root), attainable(root), capacity(root)
    now, later, whole = (room.nbytes for room in rooms)
    more = f", {_gib(later)} if its host gives more" if later > now else ""
    return Finding(
        "memory",
        "to be had",
        f"{_gib(now)} of {_gib(whole)}{more}",
        {"available": now, "attainable": later, "capacity": whole},
    )


def _cgroup(root: Path) -> Finding:
    limits, left = cgroups(root, used=False), cgroups(root)
    tightest = min(zip(left, limits), default=None)
    if tightest is None:
        return Finding("memory", "cgroup limit", "none", None)
    rest, limit = tightest
    return Finding(
        "memory",
        "cgroup limit",
        f"{_gib(limit.nbytes)} for {limit.of}, {_gib(rest.nbytes)} of it left",
        {"name": limit.of, "limit": limit.nbytes, "left": rest.nbytes},
    )


def _overcommit(root: Path) -> Finding:
    try:
        mode = (root / "proc/sys/vm/overcommit_memory").read_text().strip()
    except OSError:
        mode = ""
    strict = mode == "2"
    return Finding(
        "memory",
        "overcommit",
        {"0": "as the kernel sees fit", "1": "always", "2": "never"}.get(mode, "unknown"),
        mode,
        problem="the kernel counts memory that is mapped and not taken yet" if strict else "",
        remedy="set vm.overcommit_memory=0, or choose a tier that fits with all else" * strict,
    )


def _tier(settings: Settings, root: Path) -> Finding:
    nbytes, room = settings.cpu_bytes, shareable(root)
    problem = ""
    try:
        check_cpu_bytes(nbytes, root)
    except MemoryRefused as refusal:
        problem = str(refusal)
    text = _chosen(room) if nbytes is None else f"{_gib(nbytes)}, as asked for"
    takes = auto_bytes(room.nbytes) if nbytes is None else nbytes
    return Finding("memory", "tier", text, takes, problem, refused=bool(problem))


def _chosen(room: Room) -> str:
    return (
        f"{_gib(auto_bytes(room.nbytes))}: 1/{AUTO_PARTS} of {room},"
        f" {_gib(RESERVE_BYTES)} of which stay free; chosen again when the engine has started"
    )


def _gib(nbytes: int) -> str:
    return "unknown" if nbytes >= sys.maxsize else f"{nbytes / GIB:.1f} GiB"
