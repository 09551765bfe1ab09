"""One server in a process group of its own: start it, wait for it, end all of it."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from kvoffload_patch.cli.bench.errors import ServerFailed

HOST = "127.0.0.1"
POLL_S, PROBE_S = 0.5, 10.0
# What a server has to end by itself, and its processes to vanish once they are killed.
END_S, KILLED_S = 30.0, 10.0
TAIL_LINES = 20
# vLLM's processes log why they end, and the last of them to do so only that another did: the first
# errors before the tail say why.
HEAD_ERRORS = 3
_ERROR = re.compile(
    r"(?:^|\] (?!kvoffload_patch: ))"  # what the log says in our name is no error
    r"((?:[\w.]*(?:Error|Exception|Refused|Broken)|kvoffload_patch): \S.*)",
    re.ASCII,
)
# Below those that the system hands to other programs while a server starts.
PORTS = range(18000, 28000)
# By this process: those that asked may not listen yet.
_given: set[int] = set()

_CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def free_port() -> int:
    """A port that nobody listens on; no other call in this process is given the same.

    Raises:
        ServerFailed: there is none.
    """
    left = [port for port in PORTS if port not in _given]
    for port in random.sample(left, len(left)):
        with socket.socket() as found, suppress(OSError):
            found.bind((HOST, port))
            _given.add(port)
            return port
    raise ServerFailed(f"no TCP port between {PORTS[0]} and {PORTS[-1]} is free")


S = TypeVar("S", bound="Server")


class Server:
    """A server that answers within the ``with``; behind it none of its processes is left.

    Args:
        command: the whole command line; it makes the server listen on `port`.
        environ: its whole environment.
        log: file for what it prints.
        start_s: seconds that it may take until it answers.
        end_s: seconds that it may take to end by itself.

    Raises:
        ServerFailed: on entering: it ended, or did not answer in time; the text has the last lines
            that it printed.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], port: int, log: Path,
        start_s: float, end_s: float = END_S,
    ) -> None:  # fmt: skip
        self.port = port
        self._command, self._environ = list(command), dict(environ)
        self._log, self._start_s, self._end_s = log, start_s, end_s

    def start(self) -> None:
        """Start it, and return at once; `end` is to follow."""
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                self._command, env=self._environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self: S) -> S:
        self.start()
        try:
            self.wait()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> float | None:
        """Ask it to end; then kill what is left of its group, and wait for it.

        Returns:
            Seconds that it took to end by itself, once asked to; None if it did not, or had ended.
        """
        took = None
        try:
            if self._process.poll() is None:
                begin = time.monotonic()
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(self._end_s)
                    took = time.monotonic() - begin
        finally:  # who does not want to wait presses Ctrl-C again
            self.kill()
        return took

    def kill(self) -> None:
        """Kill its group, and wait for it."""
        self._signal_group(signal.SIGKILL)
        self._process.wait()
        until = time.monotonic() + KILLED_S
        while self._signal_group(0) and time.monotonic() < until:
            time.sleep(0.05)

    def _signal_group(self, number: int) -> bool:
        """Whether there is somebody in it."""
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    @property
    def pid(self) -> int:
        """Of its first process, and of the group."""
        return self._process.pid

    def status(self) -> int | None:
        """Exit status of its first process, once that has ended."""
        return self._process.poll()

    def get(self, path: str) -> bytes:
        """What it answers; nothing for any status but 200, or if it does not answer."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=PROBE_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.read() if answer.status == 200 else b""
        except (OSError, http.client.HTTPException):
            return b""
        finally:
            connection.close()

    def model(self) -> str:
        """The name that requests give to the model."""
        with suppress(ValueError, KeyError, IndexError, TypeError):
            return str(json.loads(self.get("/v1/models"))["data"][0]["id"])
        raise self.failure("does not name its model under /v1/models")

    def gpu_tokens(self) -> int | None:
        """Tokens that the GPU caches of all its engines hold; None if it does not say."""
        return cache_tokens(self.get("/metrics").decode("utf-8", "replace"))

    def failure(self, what: str) -> ServerFailed:
        """An error that says what it did, with the first errors and the last lines of its log."""
        with suppress(OSError):
            lines = self._log.read_text("utf-8", "replace").splitlines()
            errors = _errors(lines[:-TAIL_LINES])
            has = f"has, in this order:\n{_shown(errors)}\nand " if errors else ""
            return ServerFailed(f"{what}; its log {has}ends with:\n{_shown(lines[-TAIL_LINES:])}")
        return ServerFailed(what)

    def wait(self) -> None:
        """Return once it answers.

        Raises:
            ServerFailed: it has ended, or does not answer in time.
        """
        begin = time.monotonic()
        while not self.get("/v1/models"):
            status = self._process.poll()
            if status is not None:
                raise self.failure(f"the server ended with status {status} before it answered")
            waited = time.monotonic() - begin
            if waited > self._start_s:
                raise self.failure(f"the server did not answer within {self._start_s:g} s")
            self.waiting(waited)
            time.sleep(POLL_S)

    def waiting(self, seconds: float) -> None:
        """Called now and then while it is waited for."""


def _errors(lines: Sequence[str]) -> list[str]:
    """The first errors that differ, without what vLLM's log has before them."""
    found = [error[1] for line in lines if (error := _ERROR.search(line))]
    return list(dict.fromkeys(found))[:HEAD_ERRORS]


def _shown(lines: Sequence[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


def cache_tokens(metrics: str) -> int | None:
    """Blocks times tokens of a block, summed over engines, from the text of /metrics."""
    found = 0
    for labels in _CACHE.findall(metrics):
        given = dict(_LABEL.findall(labels))
        blocks, size = given.get("num_gpu_blocks", ""), given.get("block_size", "")
        if not (blocks.isdecimal() and size.isdecimal()):
            return None
        found += int(blocks) * int(size)
    return found or None
