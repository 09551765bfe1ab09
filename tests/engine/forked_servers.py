"""Servers that are forked from `warm_server`, which look like those of `scripts.soak`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from engine import engines, few_cores

from scripts.soak import server

_PROGRAM = Path(__file__).parent / "warm_server.py"
_FORKED_S = 120.0


class WarmServer:
    """A process with the tier to fork servers from, within the ``with``.

    Args:
        log: file for what it prints.
        env: variables of all its servers.
    """

    def __init__(self, log: Path, **env: str) -> None:
        requests, to_warm = os.pipe()
        from_warm, answers = os.pipe()
        through = [sys.executable, "-m", "kvoffload_patch", sys.executable, str(_PROGRAM)]
        env = engines.environment(**few_cores.EAGER, **env)
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [*through, str(requests), str(answers)], env=env,
                cwd=engines.ROOT, pass_fds=(requests, answers), stdin=subprocess.DEVNULL,
                stdout=out, stderr=out,
            )  # fmt: skip
        os.close(requests)
        os.close(answers)
        self._to_warm = os.fdopen(to_warm, "w", buffering=1)
        self._from_warm = os.fdopen(from_warm)
        self._asking, self._told = threading.Lock(), threading.Condition()
        self._started: list[int] = []
        self._ended: dict[int, int] = {}
        self._listener = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> WarmServer:
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._to_warm.close()
        self._process.wait(60)
        self._listener.join(60)
        self._from_warm.close()

    def fork(self, argv: list[str], env: dict[str, str], log: Path) -> Forked:
        """Start ``vllm ARGV``."""
        with self._asking, self._told:
            asked = {"spec": {"argv": argv}, "env": env, "log": str(log)}
            self._to_warm.write(json.dumps(asked) + "\n")
            assert self._told.wait_for(lambda: self._started, _FORKED_S), "it forks no server"
            return Forked(self, self._started.pop())

    def status(self, pid: int, timeout_s: float | None) -> int | None:
        """Exit status of a server, if it ends in time; None: whenever that is."""
        with self._told:
            self._told.wait_for(lambda: pid in self._ended, timeout_s)
            return self._ended.get(pid)

    def _listen(self) -> None:
        for line in self._from_warm:
            what, pid, *status = line.split()
            with self._told:
                if what == "started":
                    self._started.append(int(pid))
                else:
                    self._ended[int(pid)] = int(status[0])
                self._told.notify_all()


class Forked:
    """A forked server's first process, with what is used of `subprocess.Popen`."""

    def __init__(self, warm: WarmServer, pid: int) -> None:
        self._warm, self.pid = warm, pid

    def poll(self) -> int | None:
        """Its exit status, once it has ended."""
        return self._warm.status(self.pid, 0)

    def wait(self, timeout: float | None = None) -> int | None:
        """The same; waits for it."""
        return self._warm.status(self.pid, timeout)


class Server(server.Server):
    """One server on the tiny model.

    Args:
        warm: what it is forked from.
        model: folder of the model.
        log: file for what it prints.
        ranks: tensor-parallel ranks, each a process if there are several.
    """

    def __init__(self, warm: WarmServer, model: Path, log: Path, ranks: int = 1) -> None:
        self._warm, self._file = warm, log
        super().__init__(model, log, {}, {}, ranks)
        begin = self._command.index("serve")
        self._argv = self._command[begin:]

    def start(self) -> None:
        """Start it, and return at once."""
        forked: Any = self._warm.fork(self._argv, {}, self._file)
        self._process = forked
