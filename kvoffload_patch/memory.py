"""How much CPU memory this process may still take, and a refusal before anything is allocated.

Reads the kernel's files only: the machine's MemAvailable, the limits of every memory cgroup
(version 1 or 2) above this process, and the one of its address space (ulimit -v). Page cache that a
cgroup can drop counts as available there, as it does in MemAvailable. A virtual machine may be
given more memory as it uses what it has; that counts in `attainable`, by which tiers are refused,
and not in `available`, by which memory is taken. `capacity` is what there would be if nobody used
any. Allocates nothing and knows nothing of vLLM.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kvoffload_patch.config import AUTO, GIB, VARIABLES, ConfigError, Settings, read


class MemoryRefused(ConfigError):
    """The CPU KV cache does not fit into the memory available; one sentence for the user."""


class _CgroupFiles(NamedTuple):
    limit: str
    usage: str
    droppable: str  # the line of memory.stat that counts page cache not in use


class Room(NamedTuple):
    """Bytes that can be had, and what limits them; `sys.maxsize` where nothing tells."""

    nbytes: int
    of: str = "this machine"

    def __str__(self) -> str:
        return f"the {self.nbytes / GIB:.1f} GiB that {self.of} can give"


# What stays free beside a tier, on every device: the engine goes on taking memory while it serves.
RESERVE_BYTES = 1 << 30
# An automatic tier takes one of so many parts.
AUTO_PARTS = 2

_FILES = {
    "cgroup": _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "cgroup2": _CgroupFiles("memory.max", "memory.current", "inactive_file"),
}


# Version 1 says "no limit" as the largest number of pages, in bytes.
_NO_LIMIT = 1 << 60

# Virtio devices, by the number in sysfs, by which a host gives memory to a machine.
_VIRTIO_BALLOON, _VIRTIO_MEM = 5, 24


def available(root: Path = Path("/")) -> Room:
    """What there is now, the tightest of the machine and its cgroups."""
    return _tightest(root, _meminfo(root, "MemAvailable:"))


def attainable(root: Path = Path("/")) -> Room:
    """The same, with what the host of a virtual machine may still give to it."""
    return _tightest(root, _meminfo(root, "MemAvailable:"), _withheld(root))


def capacity(root: Path = Path("/")) -> Room:
    """What there would be if nobody used any: the same in every process, at any time."""
    return _tightest(root, _meminfo(root, "MemTotal:"), _withheld(root), used=False)


def shareable(root: Path = Path("/")) -> Room:
    """What an automatic tier takes a share of: what can be had, or is there if that has no end."""
    room = attainable(root)
    room = room if room.nbytes < sys.maxsize else available(root)
    return room if room.nbytes < sys.maxsize else Room(0, "a system without /proc/meminfo")


def cgroups(root: Path = Path("/"), used: bool = True) -> list[Room]:
    """What each limited cgroup of this process has left or, with ``used`` off, its limit."""
    return [Room(nbytes, f"cgroup {name}") for name, nbytes in _cgroup_room(root, used)]


def auto_bytes(can_give: int) -> int:
    """What an automatic tier takes of so many bytes: half, and all but the reserve at most."""
    return max(0, min(can_give // AUTO_PARTS, can_give - RESERVE_BYTES))


def locked_memory_limit_bytes() -> int:
    """RLIMIT_MEMLOCK of this process (ulimit -l); `sys.maxsize` where there is none.

    NVIDIA's driver seldom counts registered memory against it, so it is reported and nothing is
    refused for it.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def raise_locked_memory_limit() -> None:
    """Raise RLIMIT_MEMLOCK of this process to what it may be raised to."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    with suppress(OSError, ValueError):  # a system that does not allow even that
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))


def check_capacity(requested: int | None, root: Path = Path("/")) -> None:
    """Raise `MemoryRefused` if a tier can never fit here, whatever else runs."""
    _check(requested, capacity(root), "in all")


def check_cpu_bytes(requested: int | None, root: Path = Path("/")) -> None:
    """Raise `MemoryRefused` if a tier of `requested` bytes (None: auto) does not fit by now."""
    _check(requested, attainable(root) if requested is not None else shareable(root), "available")


def settings_that(fit: Callable[[int | None], None]) -> Settings:
    """The settings of the environment, of which the size is one that `fit` takes.

    Args:
        fit: `check_capacity` or `check_cpu_bytes`.

    Raises:
        ConfigError: of all that is wrong, the size as well.
    """
    wrong: ConfigError | None = None
    try:
        settings = Settings.from_env()
        size = settings.cpu_gib
    except ConfigError as error:
        wrong = error
        try:
            size = read(VARIABLES["KVOFFLOAD_CPU_GIB"], os.environ)  # type: ignore[assignment]
        except ConfigError:
            raise wrong from None  # it says that, too
    try:
        fit(None if size == AUTO else int(float(size) * GIB))
    except MemoryRefused as refusal:
        raise (ConfigError(f"{wrong} {refusal}") if wrong else refusal) from None
    if wrong:
        raise wrong
    return settings


def _check(requested: int | None, room: Room, what: str) -> None:
    asked = "auto" if requested is None else f"{requested / GIB:.1f} GiB"
    if (requested or 1) + RESERVE_BYTES > room.nbytes:
        fits = max(0, room.nbytes - RESERVE_BYTES) / GIB
        raise MemoryRefused(
            f"a CPU KV cache of {asked} was asked for, but only {fits:.1f} GiB fit: {room.of} has"
            f" {room.nbytes / GIB:.1f} GiB of memory {what}, of which"
            f" {RESERVE_BYTES / GIB:.0f} GiB stay free; "
            + ("lower KVOFFLOAD_CPU_GIB." if fits else "free or allow more memory.")
        )


def _tightest(root: Path, machine: int | None, withheld: int = 0, used: bool = True) -> Room:
    rooms = [*cgroups(root, used), *_address_space(root, used)]
    if machine is not None:
        rooms.append(Room(machine + withheld))
    found = min([*rooms, Room(sys.maxsize)], key=lambda room: room.nbytes)
    return Room(max(0, min(found.nbytes, sys.maxsize)), found.of)


def _meminfo(root: Path, key: str) -> int | None:
    kib = _line_value(root / "proc/meminfo", key)
    return None if kib is None else kib * 1024


def _withheld(root: Path) -> int:
    """Bytes that the kernel has not got and may be given.

    With a balloon the machine's memory is all there, as blocks that can be counted, and MemTotal
    lacks what the balloon holds. With virtio-mem memory is plugged in, and nothing that every
    user may read says how much there can be: it is taken for limitless, and found out by use.
    """
    devices = root / "sys/bus/virtio/devices"
    kinds = {_hex(device / "device") for device in devices.glob("*")}
    if _VIRTIO_MEM in kinds:
        return sys.maxsize
    memory = root / "sys/devices/system/memory"
    block, total = (
        _hex(memory / "block_size_bytes"),
        _line_value(root / "proc/meminfo", "MemTotal:"),
    )
    if _VIRTIO_BALLOON not in kinds or not block or total is None:
        return 0
    return max(0, block * len(list(memory.glob("memory[0-9]*"))) - total * 1024)


def _cgroup_room(root: Path, used: bool) -> Iterator[tuple[str, int]]:
    """Name and limit, less what is in use, of each limited cgroup from here up to the mount."""
    for kind, mount_root, mount_point in _memory_mounts(root):
        files = _FILES[kind]
        top = root / mount_point.lstrip("/")
        group = top / _below(_own_cgroup(root, kind), mount_root)
        for folder in (group, *group.parents):
            limit, usage = _number(folder / files.limit), _number(folder / files.usage)
            if limit is not None and limit < _NO_LIMIT and usage is not None:
                droppable = _line_value(folder / "memory.stat", files.droppable) or 0
                name = f"/{folder.relative_to(top)}".rstrip(".")
                yield name, limit - (max(0, usage - droppable) if used else 0)
            if folder == top:
                break


def _address_space(root: Path, used: bool) -> Iterator[Room]:
    """What this process may still map, where that is limited: a process that it starts has more."""
    for line in _lines(root / "proc/self/limits"):
        limit = line.removeprefix("Max address space").split()[:1]
        if line.startswith("Max address space") and limit[0].isdigit():
            mapped = "".join(_lines(root / "proc/self/statm")).split()[:1] if used else []
            nbytes = int(limit[0]) - int("".join(mapped) or 0) * resource.getpagesize()
            yield Room(nbytes, "the address space of a process (ulimit -v)")


def _memory_mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    """(file system, root within it, mount point) of every mount that may limit memory."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in _FILES:
            continue
        if kind[0] == "cgroup2" or "memory" in kind[2].split(","):
            yield kind[0], fields[3], fields[4]


def _own_cgroup(root: Path, kind: str) -> str:
    """The path of this process's memory cgroup, as the kernel names it."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") if kind == "cgroup" else not controllers:
            return path
    return "/"


def _below(path: str, mount_root: str) -> PurePosixPath:
    """`path` relative to what is mounted; the mount itself where it lies outside (containers)."""
    try:
        return PurePosixPath(path).relative_to(mount_root)
    except ValueError:
        return PurePosixPath()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The number a one-line file holds; None where it is missing or says "max"."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _hex(path: Path) -> int | None:
    """The hexadecimal number a one-line file holds; None where it is missing."""
    try:
        return int("".join(_lines(path)), 16)
    except ValueError:
        return None


def _line_value(path: Path, key: str) -> int | None:
    """The number after `key` in a file of "key number" lines."""
    for line in _lines(path):
        words = line.split()
        if len(words) > 1 and words[0] == key and words[1].isdigit():
            return int(words[1])
    return None
