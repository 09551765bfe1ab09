"""What /proc says of processes: who is above whom, and which of them run vLLM.

Processes of other users are seen with their parents alone. Nothing here raises if a process ends
meanwhile.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path

from kvoffload_patch.cli.printable import printable

SHOWN = 160  # characters of a command in our sentences

# Compiled code of vLLM's that every engine loads, under all the names that releases gave it.
_KERNELS = re.compile(r"/vllm/_[^/\n]*\.so$", re.MULTILINE)
_LISTENING = {"tcp": ("0A", 9), "tcp6": ("0A", 9), "unix": ("00010000", 6)}


def has_loaded_vllm(maps: str) -> bool:
    """Whether a process with this text of /proc/PID/maps has vLLM's compiled code in memory."""
    return bool(_KERNELS.search(maps))


def all_parents() -> dict[int, int]:
    """The parent of every process that can be seen."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            # "PID (COMMAND) STATE PARENT ...", where COMMAND may hold anything
            fields = read(f"/proc/{name}/stat").rpartition(")")[2].split()
            if fields:
                found[int(name)] = int(fields[1])
    return found


def command_of(pid: int) -> str:
    """Its command line, as a shell takes it, or the first `SHOWN` characters of it."""
    words = read(f"/proc/{pid}/cmdline")
    return brief(words.rstrip("\0").split("\0")) if words else ""


def brief(words: Sequence[str]) -> str:
    """A command line, as above."""
    text = str(printable(shlex.join(words)))
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def below(pid: int, parents: dict[int, int]) -> list[int]:
    """A process and all below it, each behind its parent."""
    children: dict[int, list[int]] = {}
    for child, parent in parents.items():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for each in found:  # grows meanwhile
        found += children.get(each, [])
    return found


def above(pid: int, parents: dict[int, int]) -> list[int]:
    """A process and all above it, each behind its child."""
    found = [pid]
    while parents.get(found[-1]):
        found.append(parents[found[-1]])
    return found


def is_made_by(parent: int, pid: int) -> bool:
    """Whether a process of vLLM's was made by this one, and not started by it as a program.

    vLLM makes its processes with Python's multiprocessing, and from 0.10.2 on gives them names of
    its own, such as VLLM::EngineCore. A fork has the command line of its parent until then.
    """
    words = read(f"/proc/{pid}/cmdline")
    made = "::" in words.partition("\0")[0] or "from multiprocessing." in words
    return made or (words != "" and words == read(f"/proc/{parent}/cmdline"))


def top(pid: int, among: Container[int], parents: dict[int, int]) -> int:
    """The process above `pid` that is reached through processes of `among` alone."""
    while parents.get(pid) in among:
        pid = parents[pid]
    return pid


def maps_of(pid: int) -> str:
    """Text of its /proc/PID/maps."""
    return read(f"/proc/{pid}/maps")


def listens(pid: int) -> bool:
    """Whether it has a socket that others connect to, as each engine has: for its ranks at least.

    `vllm --version` and clients load the same code and have none.
    """
    listening = set()
    for table, (state, inode_at) in _LISTENING.items():
        for line in read(f"/proc/{pid}/net/{table}").splitlines()[1:]:
            fields = line.split()
            # The name of a socket may have anything in it, line breaks as well.
            if len(fields) > inode_at and fields[3] == state:
                listening.add(f"socket:[{fields[inode_at]}]")
    return any(link in listening for link in _descriptors(pid))


def _descriptors(pid: int) -> list[str]:
    found = []
    with suppress(OSError):  # it has ended, or is another user's
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # this one was closed meanwhile
                found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def read(path: str) -> str:
    """Text of a file in /proc; empty for a process that has ended or is another user's."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
