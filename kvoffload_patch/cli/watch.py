"""Looks whether a command that was launched starts a vLLM engine without our start-up code.

The launch becomes the command, so that signals, the terminal, the exit status and the parent are
those of the command. A process beside it, of its own session, reads /proc until an engine below the
command has confirmed the launch's token, and ends then. A vLLM in which our code did not run (a
wrapper with another Python, or one that drops the environment) cannot say so itself: it is ended.

An engine that our code refused says so in the middle of what vLLM prints. It tells the watch as
well, which says it again when the command has ended.

Not seen: processes of other users, and those that the command leaves behind when it ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kvoffload_patch import launch_token
from kvoffload_patch._bootstrap import say, with_name
from kvoffload_patch.cli.processes import (
    all_parents,
    below,
    brief,
    command_of,
    has_loaded_vllm,
    listens,
    maps_of,
    top,
)

FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 5.0
GRACE_S = 10.0  # what an engine that we end has for its own clearing up


def start(command: Sequence[str], token: str) -> None:
    """Watch what this process, which is about to become `command`, runs.

    Raises:
        OSError: this system does not let us; nothing was started.
    """
    if not hasattr(os, "pidfd_open"):
        raise OSError("no pidfd_open")
    launch_token.confirm(launch_token.DECIDED)
    if not launch_token.confirmed(launch_token.DECIDED, token, maps_of(os.getpid())):
        raise OSError("no named memory in /proc/self/maps")
    alive = os.pidfd_open(os.getpid())
    pid = os.getpid()
    told = launch_token.listen(token)
    child = os.fork()
    if child == 0:
        _detach_and_watch(Watch(pid, alive, command, token, told))
    os.close(alive)
    if told is not None:
        told.close()
    os.waitpid(child, 0)


def _detach_and_watch(watch: Watch) -> NoReturn:
    """In the child: hand the watch to a grandchild that nobody here has to reap."""
    try:
        if os.fork() == 0:
            os.setsid()
            watch.run()
    except Exception:  # noqa: BLE001 - nobody is above to say it
        traceback.print_exc()
    finally:
        os._exit(0)


class Watch:
    """One command, by its process id, and a pidfd of it that tells when it has ended."""

    def __init__(
        self, pid: int, alive: int, command: Sequence[str], token: str, told: socket.socket | None
    ) -> None:
        self._pid = pid
        self._alive = alive
        self._command = brief(command)
        self._token = token
        self._told = told  # by engines that were refused

    def run(self) -> None:
        """Return when an engine has attached or the command has ended."""
        self._let_go()
        self._look()
        for refusal in launch_token.told(self._told) if self._told is not None else ():
            say(refusal)
        if os.getppid() == self._pid:  # the command reaps orphans, or rather does not: wait for it
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            self._ended(None)

    def _let_go(self) -> None:
        """Hold nothing that others may wait for or count, but standard error for our sentence."""
        os.chdir("/")
        with contextlib.suppress(OSError):  # a name only, and /proc may be read-only
            Path("/proc/self/comm").write_text("kvoffload-watch", encoding="utf-8")
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        kept = {0, 1, 2, self._alive, self._told.fileno() if self._told is not None else 2}
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in kept:
                with contextlib.suppress(OSError):  # that of listdir itself is closed
                    os.close(int(name))

    def _look(self) -> None:
        suspects: set[int] = set()
        pause = FIRST_PAUSE_S
        while not self._ended(pause):
            parents = all_parents()
            maps = {pid: maps_of(pid) for pid in below(self._pid, parents)}
            if any(self._confirmed(launch_token.ATTACHED, text) for text in maps.values()):
                return
            bare = {pid for pid, text in maps.items() if self._is_bare(text)}
            engines = {pid for pid in bare if listens(pid)}
            pause = min(pause * 1.5, LAST_PAUSE_S)
            for pid in engines & suspects:  # seen twice: maps are not read in one piece
                self._refuse(top(pid, bare, parents))
                engines = set()
                break
            if engines:
                pause = FIRST_PAUSE_S
            suspects = engines

    def _ended(self, seconds: float | None) -> bool:
        ended, _, _ = select.select([self._alive], [], [], seconds)
        return bool(ended)

    def _confirmed(self, what: str, maps: str) -> bool:
        return launch_token.confirmed(what, self._token, maps)

    def _is_bare(self, maps: str) -> bool:
        """Whether it has loaded vLLM without asking us first."""
        return has_loaded_vllm(maps) and not self._confirmed(launch_token.DECIDED, maps)

    def _refuse(self, pid: int) -> None:
        found = command_of(pid)
        text = (
            f"expected `{self._command}` to start vLLM with the CPU tier, found process {pid},"
            f" `{found}`, in which kvoffload_patch did not run, so it was ended; install"
            " kvoffload_patch for that Python and pass the environment on to it, or set"
            " KVOFFLOAD_STRICT=0 to serve without the CPU tier."
        )
        say(with_name(text))
        _end(pid)


def _end(pid: int) -> None:
    """Kill a process, so that its exit status says so, and let those below it clear up."""
    own, *others = map(_open, below(pid, all_parents()))
    handles = [handle for handle in others if handle is not None]
    if own is not None:
        _send(own, signal.SIGKILL if pid != 1 else signal.SIGTERM)  # 1 cannot be killed from inside
        os.close(own)
    for handle in handles:
        _send(handle, signal.SIGTERM)
    until = time.monotonic() + GRACE_S
    for handle in handles:
        if not select.select([handle], [], [], max(0.0, until - time.monotonic()))[0]:
            _send(handle, signal.SIGKILL)
        os.close(handle)


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None  # it has ended


def _send(handle: int, number: int) -> None:
    with contextlib.suppress(OSError):  # it has ended
        signal.pidfd_send_signal(handle, number)
