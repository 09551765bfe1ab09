"""Processes that have imported vLLM, and fork an engine's process when one is asked for.

Importing vLLM takes most of the time of an engine's start. What a fork shares with the next one is
modules, the tier's patches among them if it is on; an engine is built after the fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any


class WarmProcess:
    """A `driver` that waits for something to play.

    Args:
        command: starts `driver --warm`; two file descriptors are added to it.
        env: its environment.
    """

    def __init__(self, command: list[str], env: dict[str, str], cwd: Path) -> None:
        self._lock = threading.Lock()
        self._log = tempfile.NamedTemporaryFile("r+", suffix=".log")  # noqa: SIM115
        requests, to_driver = os.pipe()
        from_driver, answers = os.pipe()
        self._process = subprocess.Popen(
            [*command, str(requests), str(answers)],
            env=env,
            cwd=cwd,
            pass_fds=(requests, answers),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        os.close(requests)
        os.close(answers)
        self._to_driver = os.fdopen(to_driver, "w", buffering=1)
        self._from_driver = os.fdopen(from_driver, "rb", buffering=0)
        self._ready = False

    def play(self, spec: dict[str, Any], env: dict[str, str], timeout_s: float) -> tuple[int, str]:
        """Play on a new engine; its exit status and what it printed.

        Args:
            env: variables that this engine has besides those of the warm process.
        """
        with self._lock, tempfile.NamedTemporaryFile("r", suffix=".log") as log:
            if not self._is_ready(timeout_s):
                return self._process.wait(), self._text()
            self._to_driver.write(json.dumps({"spec": spec, "env": env, "log": log.name}) + "\n")
            pid = int(self._answer(timeout_s) or 0)
            status = self._answer(timeout_s)
            if status is None:
                os.killpg(pid, signal.SIGKILL)
                self._answer(timeout_s)
                raise TimeoutError(f"an engine took {timeout_s} s:\n{log.read()[-4000:]}")
            # Workers that an engine has left behind would hold its memory.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            return int(status), log.read()

    def close(self) -> None:
        """End it."""
        self._to_driver.close()
        self._process.wait()
        self._from_driver.close()
        self._log.close()

    def _is_ready(self, timeout_s: float) -> bool:
        if not self._ready:
            self._ready = self._answer(timeout_s) == "ready"
        return self._ready

    def _answer(self, timeout_s: float) -> str | None:
        """The next line; None if there is none in time, or never."""
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self._from_driver], [], [], timeout_s)[0]:
                return None
            byte = self._from_driver.read(1)
            if not byte:
                return None
            line += byte
        return line.decode().strip()

    def _text(self) -> str:
        self._log.seek(0)
        return self._log.read()
