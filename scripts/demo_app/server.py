"""One vLLM server as a context manager, and the counters that it publishes."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from scripts.demo_app.settings import Settings

MODEL_NAME = "demo"
START_LIMIT_S = 600


class DemoError(Exception):
    """Something went wrong that one sentence explains."""


def progress(text: str) -> None:
    """Show `text` over the previous progress line of a terminal; elsewhere do nothing."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="", flush=True)


def free_port() -> int:
    """A free TCP port below those that the system hands to other programs while a server starts."""
    ports = list(range(18000, 28000))
    random.shuffle(ports)
    for port in ports:
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise DemoError("no TCP port between 18000 and 28000 is free")


class Server:
    """`vllm serve` in its own process group, with or without the CPU tier; stopped on exit."""

    def __init__(self, model: Path, size: Settings, tier: bool, log: Path) -> None:
        self.port = free_port()
        self.log = log
        self.name = "with the CPU tier" if tier else "without the CPU tier"
        through = ["-m", "kvoffload_patch", "--cpu-gib", str(size.cpu_gib)]
        self.command = [sys.executable, *through] if tier else []
        self.command += ["vllm", "serve", str(model), *self.options(size)]
        self.env = {**os.environ, **size.env}
        self.env.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

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
        """Where the server listens."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Server":
        print(f"Server {self.name}: starting (log: {self.log})", flush=True)
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=out, env=self.env, start_new_session=True
            )
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_ready(self) -> None:
        """Return once the server answers; raise if it dies or takes too long."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < START_LIMIT_S:
            if self.process.poll() is not None:
                break
            with suppress(urllib.error.URLError, OSError), self.get("/health"):
                progress("")
                print(f"Server {self.name}: ready after {waited:.0f} s", flush=True)
                return
            progress(f"Server {self.name}: starting, {waited:.0f} s")
            time.sleep(0.5)
        progress("")
        tail = self.log.read_text(errors="replace").splitlines()[-30:]
        print("\n".join(tail), file=sys.stderr)
        status = self.process.poll()
        how = f"did not answer in {START_LIMIT_S} s" if status is None else f"ended ({status})"
        raise DemoError(
            f"the server {self.name} {how}; its last lines are above, all in {self.log}"
        )

    def get(self, path: str):
        """Open one of the server's pages."""
        return urllib.request.urlopen(self.url + path, timeout=10)

    def stop(self) -> None:
        """End the server's whole process group, at first politely."""
        for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=patience)
                break
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def counters(self) -> dict[str, float]:
        """The token counters now, summed over engines."""
        with self.get("/metrics") as answer:
            text = answer.read().decode()
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
