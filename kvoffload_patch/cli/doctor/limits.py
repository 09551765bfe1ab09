"""What this process may lock, map and share."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from kvoffload_patch.cli.doctor.findings import Finding

NEEDED_SHM_BYTES = 160 << 20  # vLLM 0.32 does not start with less; Docker gives 64 MiB
_SHARING = "of several ranks, or on the CPU,"


def check(tier_bytes: int, gpu: bool, root: Path = Path("/")) -> list[Finding]:
    """The limits that a tier of so many bytes meets."""
    return [_locked(tier_bytes, gpu), _address_space(tier_bytes), _shared(root / "dev/shm")]


def _locked(tier_bytes: int, gpu: bool) -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    low = gpu and 0 <= hard < tier_bytes  # unlimited is below 0
    return Finding(
        "limits",
        "locked memory",
        _bytes(hard) + ("" if gpu else ", not needed without a GPU"),
        None if hard < 0 else hard,
        problem="a driver that counts registered memory as locked would end the tier's growth at"
        f" {_bytes(hard)}"
        if low
        else "",
        remedy="raise ulimit -l, or give a container --ulimit memlock=-1" if low else "",
    )


def _address_space(tier_bytes: int) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    low = 0 <= soft < 2 * tier_bytes
    return Finding(
        "limits",
        "address space",
        _bytes(soft),
        None if soft < 0 else soft,
        problem=f"a process may map {_bytes(soft)}, little for a tier of {_bytes(tier_bytes)}"
        if low
        else "",
        remedy="set ulimit -v unlimited" if low else "",
    )


def _shared(folder: Path) -> Finding:
    """Where ranks share how many slots they have, and vLLM's processes their messages."""
    try:
        room = os.statvfs(folder)
        size, free = room.f_frsize * room.f_blocks, room.f_frsize * room.f_bavail
    except OSError:
        size = free = 0
    problem = remedy = ""
    if not os.access(folder, os.W_OK) or not free:
        problem = f"{folder} cannot be written to, which engines {_SHARING} need"
        remedy = "mount a tmpfs there that this user may write to, or free some of it"
    elif free < NEEDED_SHM_BYTES:
        problem = f"{folder} has {_bytes(free)} free, too little for an engine {_SHARING} to start"
        remedy = "give a container --shm-size=8g or --ipc=host, or free some of it"
    found = f"{_bytes(free)} of {_bytes(size)} free"
    return Finding("limits", "/dev/shm", found, {"size": size, "free": free}, problem, remedy)


def _bytes(number: int) -> str:
    if number < 0:
        return "unlimited"
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 30 else f"{number >> 10} kB"
