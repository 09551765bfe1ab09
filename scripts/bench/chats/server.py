"""The server that a mode is measured on: its command, its environment, its start and its end.

Everything is vLLM's default but what the measurement needs: the size of the GPU cache, prompts as
token ids without a tokenizer, random weights where the model's folder has none, and how many prompt
tokens were found, said with each answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts import Refused
from scripts.bench.chats.client import MODEL
from scripts.bench.chats.load import Load
from scripts.bench.serve import modes

FLOOR = "floor"  # plain vLLM whose GPU cache holds everything
POLL_S = 0.2
END_S = 5.0


@dataclass
class Setup:
    """What all servers of a run have in common.

    Attributes:
        model: folder of the model; random weights are used if it holds none.
        small: a CPU and a tiny model.
        engine: more arguments of the server, as `vllm serve` names them with underscores.
        out: folder for logs.
        timeout: seconds that a mode may take, its start included.
        times: write down when each token came, and what the server says of each request.
        phases: which are played, in order.
    """

    model: Path
    load: Load
    small: bool
    engine: dict[str, Any]
    out: Path
    timeout: float
    times: bool
    phases: list[str]


def engine_mode(mode: str) -> str:
    """The mode as `bench serve` names it: the floor is plain vLLM.

    Raises:
        Refused: not the name of a mode.
    """
    plain = "off" if mode == FLOOR else mode
    with_floor = ", ".join((FLOOR, *modes.NAMES))
    try:
        modes.parse(plain)
    except ValueError as error:
        raise Refused(f"{error} (here: {with_floor})") from None
    return plain


def tier_gib(mode: str, load: Load) -> float:
    """GiB of CPU memory that a mode is given; 0 for none."""
    name = modes.parse(engine_mode(mode))[0]
    if name == "off":
        return 0.0
    return load.cpu_gib if name in ("ours", "simple") else load.offloading_gib


def arguments(mode: str, setup: Setup) -> dict[str, Any]:
    """What `vllm serve` is started with besides the model."""
    load = setup.load
    blocks = load.floor_gpu_blocks if mode == FLOOR else load.gpu_blocks
    made: dict[str, Any] = {
        "served_model_name": MODEL,
        "skip_tokenizer_init": True,
        "enable_prompt_tokens_details": True,
    }
    if blocks:
        made["num_gpu_blocks_override"] = blocks
    if load.max_model_len:
        made["max_model_len"] = load.max_model_len
    if not any(setup.model.glob("*.safetensors")):
        made["load_format"] = "dummy"
    if setup.small:
        made.update(enforce_eager=True, dtype="float32")
    if setup.times:
        made["enable_per_request_metrics"] = True
    more = modes.engine_arguments(engine_mode(mode), tier_gib(mode, load))
    return {**made, **more, **setup.engine}


def flags(arguments: dict[str, Any]) -> list[str]:
    """Arguments as words of a command line."""
    words = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words += [f"--{option}", text]
    return words


def command(mode: str, setup: Setup, port: int) -> list[str]:
    """The command line of a mode's server."""
    serve = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(setup.model.resolve())),
        *("--host", "127.0.0.1", "--port", str(port)),
        *flags(arguments(mode, setup)),
    ]
    if modes.parse(engine_mode(mode))[0] == "ours":
        return [sys.executable, "-m", "kvoffload_patch", *serve]
    return serve


def environment(mode: str, setup: Setup, gpu: str, slot: int) -> dict[str, str]:
    """The environment of a mode's server.

    Args:
        gpu: the devices that it may see; empty for all.
        slot: number of the server among those that run side by side. Compiled code is kept apart,
            because two servers that start together would write the same files.
    """
    env = modes.environment(engine_mode(mode), tier_gib(mode, setup.load), setup.small)
    if gpu:
        env["CUDA_VISIBLE_DEVICES"] = gpu
        # Kept from run to run, as vLLM's own is; not beside the results, being thousands of files.
        env["VLLM_CACHE_ROOT"] = str(Path(tempfile.gettempdir()) / f"bench-chats-cache-{slot}")
    return env


class ServerEnded(Exception):
    """It ended before it was asked to; its own last lines say why."""


class Server:
    """A server's process, in the group of this one; what it says goes where this one's does."""

    def __init__(self, words: list[str], port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._began = time.perf_counter()
        self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL)

    def wait(self) -> float:
        """Wait until it answers; returns the seconds from its start.

        Raises:
            ServerEnded: it ended.
        """
        while not self._healthy():
            if self._process.poll() is not None:
                raise ServerEnded(f"the server ended with status {self._process.returncode}")
            time.sleep(POLL_S)
        return time.perf_counter() - self._began

    def _healthy(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def end(self) -> None:
        """Ask it to end, and do not wait long: the process that started this one ends its group."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
