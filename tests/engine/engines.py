"""Runs `driver` in a process of its own, with the tier off or on, new or forked from a warm one."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from engine import release, ways
from engine.warm import Forked, WarmProcess

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TIMEOUT_S = 400
# What several tests play on one engine.
SHARED = [
    "setup",
    "sensitivity",
    "conversations",
    "twins",
    "one_token",
    "whole_blocks",
    "preemption",
    "salts",
    "reset",
    "abort_while_loading",
    "reset_while_loading",
]


def evicted_tokens() -> int:
    """Tokens that `conversations` finds again: every full block of the turns before.

    Each of 10 conversations begins with 380 tokens; a turn appends 12 tokens of answer, the last
    of which was never computed, and 90 of the next question.
    """
    block = release.block_size()
    return 10 * sum((380 + turn * (12 + 90) + 12 - 1) // block * block for turn in range(2))


# Tests count what is loaded. How much of a prefix the GPU keeps depends on when requests end, so it
# keeps what plain vLLM's does, unless a test says otherwise.
COUNTED = {"KVOFFLOAD_GPU_PREFIXES": "whole"}


@dataclass
class Run:
    """One engine process: its exit status, what it printed, and the scenarios' results."""

    returncode: int
    log: str
    tiered: bool = False
    results: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, scenario: str) -> Any:
        if scenario not in self.results:
            raise AssertionError(f"no result of {scenario}:\n{self.log[-12000:]}")
        return self.results[scenario]


@cache
def _sockets() -> str:
    """A folder for vLLM's own sockets, which it leaves behind: it goes with this process."""
    folder, owner = tempfile.mkdtemp(prefix="vllm-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not a child that was forked
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def environment(**extra: str) -> dict[str, str]:
    """A clean environment for an engine on the CPU, without network and without the switch."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVOFFLOAD_", "VLLM_"))}
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",  # more only spin: the model is tiny
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "KVOFFLOAD_CONTROL": "0",  # in a folder that other engines of this machine use
        "VLLM_RPC_BASE_PATH": _sockets(),
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(HERE), *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
        ),
        **release.environment(),
        **ways.environment(),
        **extra,
    }


def run(
    scenarios: list[str],
    engine: dict[str, Any],
    tier: dict[str, str] | None = None,
    late: int | str = 0,
    way: str = "command",
    warm: WarmProcesses | None = None,
    prefix: Sequence[str] = (),
    **extra: str,
) -> Run:
    """Play scenarios on an engine.

    Args:
        scenarios: names of functions in `scenarios`.
        engine: arguments of `vllm.LLM`.
        tier: None for plain vLLM; else KVOFFLOAD_* variables.
        way: ``command``: through ``python -m kvoffload_patch``; ``flag``: KVOFFLOAD_ENABLE alone,
            for the start-up file; ``plugin``: the same, with the start-up file's hook taken out.
        late: how late copies happen, see `late_copies` and `late_layers`.
        warm: processes to fork from; None: start a new one.
        prefix: of the command line of a new one.
        extra: more environment variables.
    """
    if tier is not None:  # late copies, and a machine with much else to do, look like a slow bus
        tier = {"KVOFFLOAD_RECOMPUTE": "never", **tier}
    spec = {"engine": engine, "scenarios": scenarios, "late": late, "way": way}
    extra = {**release.environment(engine.get("tensor_parallel_size", 1)), **extra}
    if warm is not None and way == "command":
        status, log = warm.play(spec, tier, extra)
    else:
        command, env = _command(json.dumps(spec), tier, way)
        done = subprocess.run(
            [*prefix, *command],
            env={**env, **extra},
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
        status, log = done.returncode, done.stdout
    if "TEST_LOGS" in os.environ:
        _keep(log, f"{'plain' if tier is None else 'tier'}-{scenarios[-1]}-")
    found = [line for line in log.splitlines() if line.startswith("RESULT ")]
    results = json.loads(found[-1][len("RESULT ") :]) if found else {}
    return Run(status, log, tier is not None, results)


def _keep(log: str, begins: str) -> None:
    """In the folder TEST_LOGS, to look for the cause of a failure."""
    handle, _ = tempfile.mkstemp(".log", begins, os.environ["TEST_LOGS"])
    with open(handle, "w", encoding="utf-8") as file:
        file.write(log)


def _command(
    argument: str, tier: dict[str, str] | None, way: str
) -> tuple[list[str], dict[str, str]]:
    """How `driver` is started, and its environment."""
    command, env = [sys.executable, str(HERE / "driver.py"), argument], environment()
    if tier is not None:
        env.update({"KVOFFLOAD_CPU_GIB": "0.25", **COUNTED, **tier})
        if way == "command":
            command = [sys.executable, "-m", "kvoffload_patch", *command]
        else:
            env["KVOFFLOAD_ENABLE"] = "1"
    return command, env


class WarmProcesses:
    """Two processes to fork from, plain vLLM's and one with the tier; started when needed.

    Args:
        folder: of the tests that share them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[bool, WarmProcess] = {}

    def play(
        self, spec: dict[str, Any], tier: dict[str, str] | None, extra: dict[str, str]
    ) -> tuple[int, str]:
        """Exit status and log of an engine forked from the right one."""
        warm = self._process(tier is not None)
        return warm.play(spec, {**(tier or {}), **extra}, TIMEOUT_S)

    def start_server(
        self, words: list[str], env: dict[str, str], log: Path, tiered: bool = True
    ) -> Forked:
        """``vllm WORDS`` with these variables; what it prints goes to the file."""
        found = self._process(tiered).fork({"argv": words}, env, log)
        assert found is not None, "there is no process to fork from"
        return found

    def _process(self, tiered: bool) -> WarmProcess:
        if tiered not in self._started:
            command, env = _command("--warm", {} if tiered else None, "command")
            name = "tier" if tiered else "plain"
            self._started[tiered] = WarmProcess(command, env, ROOT, self._folder, name)
        return self._started[tiered]

    def close(self) -> None:
        """End them."""
        for process in self._started.values():
            process.close()
