"""Processes that have imported vLLM, and fork an engine's process when one is asked for.

Importing vLLM takes most of the time of an engine's start. What a fork shares with the next one is
modules, the tier's patches among them if it is on; an engine is built after the fork. Workers of
pytest-xdist share such a process: who needs it first starts it, and it ends with the last of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.forking import READY

_READY_S = 400.0  # that importing vLLM may take, on a machine that has much else to do


class WarmProcess:
    """A `driver` that waits for something to play, of this process or shared with others.

    Args:
        command: starts `driver --warm`; a file descriptor is added to it.
        env: its environment.
        folder: whose processes share it; what it prints goes to a file there.
        name: of the process there.
    """

    def __init__(
        self, command: list[str], env: dict[str, str], cwd: Path, folder: Path, name: str
    ) -> None:
        self._folder, self._name, self._log = folder, name, folder / f"{name}.log"
        self._started: subprocess.Popen[bytes] | None = None
        with self._alone():
            self._lease = self._connected()
            if self._lease is None:
                self._start(command, env, cwd)
                self._lease = self._connected()

    def play(self, spec: dict[str, Any], env: dict[str, str], timeout_s: float) -> tuple[int, str]:
        """Play on a new engine; its exit status and what it printed.

        Args:
            env: variables that this engine has besides those of the warm process.
        """
        with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
            forked = self.fork(spec, env, log.name)
            if forked is None:
                return self._ended() or 1, self._log.read_text()
            try:
                return forked.wait(timeout_s), log.read()
            except subprocess.TimeoutExpired:
                said = log.read()[-4000:]
                raise TimeoutError(f"an engine took {timeout_s} s:\n{said}") from None
            finally:
                # Workers that an engine has left behind would hold its memory.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(forked.pid, signal.SIGKILL)

    def fork(self, spec: dict[str, Any], env: dict[str, str], log: str | Path) -> Forked | None:
        """Start a child with this to do; None: there is no warm process."""
        connection = self._connected() if self._lease else None
        if connection is None:
            return None
        asked = {"spec": spec, "env": env, "log": str(log)}
        connection.sendall(json.dumps(asked).encode() + b"\n")
        return Forked(connection)

    def close(self) -> None:
        """End it, once nobody else uses it."""
        if self._lease:
            self._lease.close()
        self._ended()  # or others go on with it

    def _ended(self) -> int | None:
        """The status of what this object has started, if it ends about now."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._started.wait(1) if self._started else None
        return None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with (self._folder / f"{self._name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _address(self) -> Iterator[str]:
        """A short one: a socket's path has 108 bytes at most."""
        folder = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{folder}/{self._name}.sock"
        finally:
            os.close(folder)

    def _start(self, command: list[str], env: dict[str, str], cwd: Path) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with listener, self._address() as address, self._log.open("wb") as log:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address)
            listener.bind(address)
            listener.listen(64)
            self._started = subprocess.Popen(
                [*command, str(listener.fileno())], env=env, cwd=cwd,
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _connected(self) -> socket.socket | None:
        """A connection to the process, once it is ready; None: there is none, or it has ended."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(OSError), self._address() as address:
            connection.settimeout(_READY_S)
            connection.connect(address)
            if connection.recv(len(READY), socket.MSG_WAITALL) == READY:
                connection.settimeout(None)
                return connection
        connection.close()
        return None


class Forked:
    """A forked process, with what is used of `subprocess.Popen`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        # Unbuffered: a status read ahead with the pid is one that `select` never sees.
        self._lines = connection.makefile("rb", buffering=0)
        self.pid = int(self._lines.readline())
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status, once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """The same; waits for it.

        Raises:
            TimeoutExpired: it has not ended in time.
        """
        if self._status is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self._status = int(self._lines.readline())
            self._lines.close()
            self._connection.close()
        return self._status

    def terminate(self) -> None:
        """Ask it to end, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)
