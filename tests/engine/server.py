"""`vllm serve` on the tiny model, over HTTP; ended with all its processes."""

from __future__ import annotations

import http.client
import json
import os
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine import engines, few_cores, release, ways

from kvoffload_patch.cli.bench import server

START_LIMIT_S = 300.0
MODEL = "tiny"
MAX_TOKENS = 384


class Server(server.Server):
    """One server, ready within the ``with``.

    Args:
        model: folder of the model.
        log: file for what it prints.
        options: of `vllm serve` besides its own.
        tier: KVOFFLOAD_* variables; None: plain vLLM.
        warm: what it is forked from, and its engine cores from it; None: it starts as a user's.
    """

    def __init__(
        self, model: Path, log: Path, options: list[str], tier: dict[str, str] | None,
        warm: engines.WarmProcesses | None = None,
    ) -> None:  # fmt: skip
        port = server.free_port()
        through = [sys.executable, "-m", "kvoffload_patch"] if tier is not None else []
        # In a chosen way its engine cores are to have what the CPU's platform turns off.
        forking = [sys.executable, str(Path(__file__).parent / "forked_server.py")]
        command = [
            *through, *(forking if ways.chosen() else ["vllm"]), "serve", str(model),
            "--host", server.HOST, "--port", str(port),
            "--served-model-name", MODEL, "--dtype", release.dtype(),
            "--max-model-len", str(MAX_TOKENS),
            "--enforce-eager", "--enable-prefix-caching", *options,
        ]  # fmt: skip
        paths = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        extra = {"PATH": os.pathsep.join(paths), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        extra.update(few_cores.EAGER)
        extra.update(release.preloaded_names())  # the loader says that there are none
        sizes = {"KVOFFLOAD_CPU_GIB": "0.25", **engines.COUNTED} if tier is not None else {}
        self._variables = {**sizes, **(tier or {}), **extra}
        env = engines.environment(**self._variables)
        super().__init__(command, env, port, log, START_LIMIT_S)
        self._warm, self._tiered = warm, tier is not None

    def start(self) -> None:
        """Start it, and return at once."""
        if self._warm is None:
            return super().start()
        words = self._command[self._command.index("serve") :]
        forked: Any = self._warm.start_server(words, self._variables, self._log, self._tiered)
        self._process = forked

    def __exit__(self, *raised: Any) -> None:
        """End it, and note how its engines have run."""
        super().__exit__(*raised)
        if self._tiered and ways.chosen():
            ways.note(self._log.read_text(encoding="utf-8", errors="replace"))

    def ask(
        self, tokens: list[int], count: int = 4, arguments: Mapping[str, object] | None = None,
        **headers: str,
    ) -> dict[str, Any]:  # fmt: skip
        """The completion of a prompt.

        Args:
            tokens: of the prompt.
            count: of tokens to answer with.
            arguments: that plugins read, in the request's own field for them.
            headers: of the request, besides.
        """
        body = {
            "model": MODEL, "prompt": tokens, "max_tokens": count, "temperature": 0,
            "ignore_eos": True, "stream": False, **({"vllm_xargs": arguments} if arguments else {}),
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://{server.HOST}:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **headers},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def get_status(self, path: str) -> int | None:
        """The status of what it answers; None if it does not answer."""
        connection = http.client.HTTPConnection(server.HOST, self.port, timeout=server.PROBE_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """/metrics, by name with labels."""
        lines = self.get("/metrics").decode().splitlines()
        pairs = [line.rpartition(" ") for line in lines if line and line[0] != "#"]
        return {name: float(value) for name, _, value in pairs}
