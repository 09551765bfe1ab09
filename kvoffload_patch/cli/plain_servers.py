"""Servers that run vLLM without a tier, which no socket of ours tells of; root sees all users'."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import takewhile
from typing import Any

from kvoffload_patch import config
from kvoffload_patch.cli import processes
from kvoffload_patch.cli.printable import printable

# The variables that say where its socket is (`control.folder.candidates`).
_WHERE = ("XDG_RUNTIME_DIR", "TMPDIR")


def found(tiers: Collection[int]) -> list[dict[str, Any]]:
    """Each such server: its first ``process``, the ``command`` of that, and the ``reason``.

    The first is the one that was started as a program, and has made the others. It may have loaded
    none of vLLM's compiled code, as where it makes several API servers. A server in a container is
    left out, unless we are in it: its engines cannot be asked from here.

    Args:
        tiers: processes of engines that have a tier.
    """
    parents = processes.all_parents()
    seen = [pid for pid in parents if _is_seen(pid)]
    vllm = {pid for pid in seen if processes.has_loaded_vllm(processes.maps_of(pid))}

    def first(pid: int) -> int:
        line = processes.above(pid, parents)
        made = takewhile(lambda pair: processes.is_made_by(pair[1], pair[0]), zip(line, line[1:]))
        return line[sum(1 for _ in made)]

    served = {first(pid) for pid in vllm if processes.listens(pid)}
    served -= {first(pid) for pid in tiers}
    plain = [pid for pid in sorted(served) if not {*tiers} & {*processes.above(pid, parents)}]
    return [
        {"process": pid, "command": processes.command_of(pid), "reason": _reason(pid)}
        for pid in plain
    ]


def text(one: dict[str, Any]) -> str:
    """A sentence on one of them."""
    return f"process {one['process']}, `{one['command']}`, has no tier to be seen: {one['reason']}"


def _is_seen(pid: int) -> bool:
    """Whether it sees the same files as this process."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
    return False


def _reason(pid: int) -> str:
    """What it was started with, as far as that says why; its log knows the rest."""
    lines = processes.read(f"/proc/{pid}/environ").split("\0")
    environ = dict(line.split("=", 1) for line in lines if "=" in line)
    with suppress(config.ConfigError):
        if not config.is_enabled(environ):
            return "its environment does not switch it on; use `kvoffload vllm serve MODEL`."
        if not config.read(config.VARIABLES["KVOFFLOAD_CONTROL"], environ):
            return "it has KVOFFLOAD_CONTROL=0, so it cannot be asked."
    return f"it is starting or ending, or its log says why; if not, {_elsewhere(pid, environ)}"


def _elsewhere(pid: int, environ: Mapping[str, str]) -> str:
    """Why its socket was not found if it has one, and what to do then."""
    with suppress(OSError):
        if (owner := os.stat(f"/proc/{pid}").st_uid) != os.geteuid():  # as root sees them
            return f"user {owner} runs it: ask as that user."
    own = [(name, environ.get(name, "")) for name in _WHERE]
    others = [f"{name}={value}" for name, value in own if value not in ("", os.environ.get(name))]
    if others:
        return f"its socket is elsewhere: ask with {printable(shlex.join(others))}."
    return "the folder of its socket was removed: restart it."
