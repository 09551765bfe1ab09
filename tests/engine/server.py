"""`vllm serve` on the tiny model, over HTTP; ended with all its processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine import engines

START_LIMIT_S = 300.0
MODEL = "tiny"
MAX_TOKENS = 384


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Server:
    """One server, ready within the ``with``.

    Args:
        model: folder of the model.
        log: file for what it prints.
        options: of `vllm serve` besides its own.
        tier: KVOFFLOAD_* variables; None: plain vLLM.
    """

    def __init__(
        self, model: Path, log: Path, options: list[str], tier: dict[str, str] | None
    ) -> None:
        self._port, self._log = free_port(), log
        through = [sys.executable, "-m", "kvoffload_patch"] if tier is not None else []
        self._command = [
            *through, "vllm", "serve", str(model), "--host", "127.0.0.1", "--port", str(self._port),
            "--served-model-name", MODEL, "--dtype", "float32", "--max-model-len", str(MAX_TOKENS),
            "--enforce-eager", "--enable-prefix-caching", *options,
        ]  # fmt: skip
        paths = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        extra = {"PATH": os.pathsep.join(paths), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        sizes = {"KVOFFLOAD_CPU_GIB": "0.25"} if tier is not None else {}
        self._env = engines.environment(**{**sizes, **(tier or {}), **extra})

    def __enter__(self) -> Server:
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                self._command, stdout=out, stderr=out, env=self._env, start_new_session=True
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def ask(self, tokens: list[int], count: int = 4) -> dict[str, Any]:
        """The completion of a prompt."""
        body = {
            "model": MODEL, "prompt": tokens, "max_tokens": count, "temperature": 0,
            "ignore_eos": True, "stream": False,
        }  # fmt: skip
        request = urllib.request.Request(
            self._url("/v1/completions"),
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def metrics(self) -> dict[str, float]:
        """/metrics, by name with labels."""
        with urllib.request.urlopen(self._url("/metrics"), timeout=10) as page:
            lines = page.read().decode().splitlines()
        pairs = [line.rpartition(" ") for line in lines if line and line[0] != "#"]
        return {name: float(value) for name, _, value in pairs}

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._port}{path}"

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + START_LIMIT_S
        while time.monotonic() < until and self._process.poll() is None:
            with suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(self._url("/health"), timeout=5).close()
                return
            time.sleep(0.5)
        raise AssertionError(f"the server did not start:\n{self._log.read_text()[-8000:]}")

    def _stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=30)
                break
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
