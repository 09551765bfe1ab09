"""What this process may lock, map and share."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

from kvoffload_patch.cli.doctor.findings import Finding
from kvoffload_patch.patching import find_source

# From 0.27 on vLLM does not start a worker unless 240 MiB are free for its answers. By then its
# other queues have taken 4 MiB of one worker, and 8 of two. Docker gives 64 MiB.
NEEDED_SHM_BYTES = 256 << 20
_SHARING = "of several ranks, or on the CPU,"
# vLLM's own switch: an engine in its user's process has no queue to its worker on the CPU.
_APART = "VLLM_ENABLE_V1_MULTIPROCESSING"


def check(
    tier_bytes: int,
    gpu: bool,
    on_cpu: bool,
    root: Path = Path("/"),
    find: Callable[[str], Path] = find_source,
) -> list[Finding]:
    """The limits that a tier of so many bytes meets, with a GPU or with vLLM's CPU build."""
    shared = _shared(root / "dev/shm", on_cpu, find)
    return [_locked(tier_bytes, gpu), _address_space(tier_bytes), shared]


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


def _shared(folder: Path, on_cpu: bool, find: Callable[[str], Path]) -> Finding:
    """Where vLLM's processes have their locks and share their messages; the tier has nothing there.

    Refused on the CPU alone: elsewhere an engine may have one rank, which shares none.
    """
    try:
        room = os.statvfs(folder)
        size, free = room.f_frsize * room.f_blocks, room.f_frsize * room.f_bavail
    except OSError:
        size = free = 0
    problem, remedy, refused = "", "", False
    if not os.access(folder, os.W_OK) or not free:
        problem = f"{folder} cannot be written to, which engines {_SHARING} need"
        remedy = "mount a tmpfs there that this user may write to, or free some of it"
        refused = on_cpu
    elif free < NEEDED_SHM_BYTES:
        problem = (
            f"{folder} has {_bytes(free)} free, too little for an engine {_SHARING} to start: "
            f"vLLM needs about {NEEDED_SHM_BYTES >> 20} MiB there"
        )
        remedy = "give a container --shm-size=8g or --ipc=host, or free some of it"
        refused = on_cpu and os.environ.get(_APART) != "0" and _asks_for_room(find)
    found, value = f"{_bytes(free)} of {_bytes(size)} free", {"size": size, "free": free}
    return Finding("limits", "/dev/shm", found, value, problem, remedy, refused)


def _asks_for_room(find: Callable[[str], Path]) -> bool:
    """Whether this vLLM looks for room before it starts; older ones may start with less."""
    try:
        source = find("vllm.distributed.device_communicators.shm_broadcast").read_text("utf-8")
    except OSError:
        return False
    return "check_shm_free_space" in source


def _bytes(number: int) -> str:
    if number < 0:
        return "unlimited"
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 30 else f"{number >> 10} kB"
