"""One vLLM server as a context manager, and the counters that it publishes."""

import os
import re
import sys
import time
from pathlib import Path

from kvoffload_patch.cli.bench import server
from scripts.demo_app.settings import Settings

MODEL_NAME = "demo"
START_LIMIT_S = 600


class DemoError(Exception):
    """Something went wrong that one sentence explains."""


def progress(text: str) -> None:
    """Show `text` over the previous progress line of a terminal; elsewhere do nothing."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="", flush=True)


class Server(server.Server):
    """`vllm serve` with or without the CPU tier."""

    def __init__(self, model: Path, size: Settings, tier: bool, log: Path) -> None:
        self.port = server.free_port()
        self.name = "with the CPU tier" if tier else "without the CPU tier"
        through = ["-m", "kvoffload_patch", "--cpu-gib", str(size.cpu_gib)]
        command = [sys.executable, *through] if tier else []
        command += ["vllm", "serve", str(model), *self.options(size)]
        env = {**os.environ, **size.env}
        env.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
        super().__init__(command, env, self.port, log, START_LIMIT_S)

    def options(self, size: Settings) -> list[str]:
        """The server's command line after the model; the same with and without the tier."""
        named = {
            "host": "127.0.0.1",
            "port": self.port,
            "served-model-name": MODEL_NAME,
            "dtype": size.dtype,
            "max-model-len": size.max_model_len,
            "block-size": size.block_size,
            "num-gpu-blocks-override": size.gpu_blocks,
            "max-num-seqs": 8,
            "seed": 0,
        }
        flags = ["--enforce-eager", "--enable-prefix-caching"]
        return [part for k, v in named.items() for part in (f"--{k}", str(v))] + flags

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{server.HOST}:{self.port}"

    def start(self) -> None:
        """Start it, and say so."""
        print(f"Server {self.name}: starting (log: {self._log})", flush=True)
        super().start()

    def wait(self) -> None:
        """Return once it answers; how long that has taken is shown."""
        began = time.monotonic()
        try:
            super().wait()
        finally:
            progress("")
        print(f"Server {self.name}: ready after {time.monotonic() - began:.0f} s", flush=True)

    def waiting(self, seconds: float) -> None:
        """Show it."""
        progress(f"Server {self.name}: starting, {seconds:.0f} s")

    def counters(self) -> dict[str, float]:
        """The token counters now, summed over engines."""
        text = self.get("/metrics").decode()
        if not text:
            raise self.failure("the server does not give its metrics")
        return read_counters(text)


def read_counters(text: str) -> dict[str, float]:
    """Prompt tokens in all, found in vLLM's prefix cache, and loaded from CPU memory.

    What the tier loads goes into the prefix cache before the request is scheduled, so vLLM counts
    it as an ordinary hit, which the tier has vLLM count as an external one instead.
    """
    names = {
        "prompt": "prompt_tokens",
        "cached": "prefix_cache_hits",
        "loaded": "external_prefix_cache_hits",
    }
    totals = {}
    for key, name in names.items():
        lines = re.findall(rf"^vllm:{name}(?:_total)?(?:{{.*?}})? (\S+)$", text, re.MULTILINE)
        totals[key] = sum(float(value) for value in lines)
    return totals
