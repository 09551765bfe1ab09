"""How much CPU memory this process may still take, and a refusal before anything is allocated.

Reads the kernel's files only: the machine's MemAvailable and the limits of every memory cgroup
(version 1 or 2) above this process. Page cache that a cgroup can drop counts as available there,
as it does in MemAvailable. A virtual machine may be given more memory as it uses what it has; that
counts in `attainable_memory_bytes`, by which tiers are refused, and not in
`available_memory_bytes`, by which memory is taken. Allocates nothing and knows nothing of vLLM.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kvoffload_patch.config import GIB, ConfigError


class MemoryRefused(ConfigError):
    """The CPU KV cache does not fit into the memory available; one sentence for the user."""


class _CgroupFiles(NamedTuple):
    limit: str
    usage: str
    droppable: str  # the line of memory.stat that counts page cache not in use


_FILES = {
    "cgroup": _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "cgroup2": _CgroupFiles("memory.max", "memory.current", "inactive_file"),
}


# Virtio devices, by the number in sysfs, by which a host gives memory to a machine.
_VIRTIO_BALLOON, _VIRTIO_MEM = 5, 24


def available_memory_bytes(root: Path = Path("/")) -> int:
    """What there is now in bytes, the tightest of the machine and its cgroups.

    `sys.maxsize` where no file tells.
    """
    return _tightest(root, _machine_available(root))


def attainable_memory_bytes(root: Path = Path("/")) -> int:
    """The same, with what the host of a virtual machine may still give to it."""
    available = _machine_available(root)
    return _tightest(root, None if available is None else available + _withheld(root))


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


def check_cpu_bytes(requested: int, root: Path = Path("/")) -> None:
    """Raise `MemoryRefused` if a CPU KV cache of `requested` bytes can never fit."""
    available = attainable_memory_bytes(root)
    if requested > available:
        raise MemoryRefused(
            f"a CPU KV cache of {requested / GIB:.1f} GiB was asked for, but only"
            f" {available / GIB:.1f} GiB of memory are available here;"
            " lower KVOFFLOAD_CPU_GIB (or --cpu-gib)."
        )


def _tightest(root: Path, machine: int | None) -> int:
    found = list(_cgroup_headroom(root))
    if machine is not None:
        found.append(machine)
    return max(0, min([*found, sys.maxsize]))


def _machine_available(root: Path) -> int | None:
    kib = _line_value(root / "proc/meminfo", "MemAvailable:")
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


def _cgroup_headroom(root: Path) -> Iterator[int]:
    """Limit minus what is in use, for each limited cgroup from this process up to the mount."""
    for kind, mount_root, mount_point in _memory_mounts(root):
        files = _FILES[kind]
        top = root / mount_point.lstrip("/")
        group = top / _below(_own_cgroup(root, kind), mount_root)
        for folder in (group, *group.parents):
            limit, usage = _number(folder / files.limit), _number(folder / files.usage)
            if limit is not None and usage is not None:
                droppable = _line_value(folder / "memory.stat", files.droppable) or 0
                yield limit - max(0, usage - droppable)
            if folder == top:
                break


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
