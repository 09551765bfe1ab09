"""Runs `driver` in a process of its own, with the tier off or on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TIMEOUT_S = 400
# What several tests play on one engine.
SHARED = ["sensitivity", "conversations", "twins", "one_token", "preemption", "salts", "reset"]


@dataclass
class Run:
    """One engine process: its exit status, what it printed, and the scenarios' results."""

    returncode: int
    log: str
    results: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, scenario: str) -> Any:
        if scenario not in self.results:
            raise AssertionError(f"no result of {scenario}:\n{self.log[-4000:]}")
        return self.results[scenario]


def environment(**extra: str) -> dict[str, str]:
    """A clean environment for an engine on the CPU, without network and without the switch."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVOFFLOAD_", "VLLM_"))}
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",  # more only spin: the model is tiny
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(HERE), *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
        ),
        **extra,
    }


def run(
    scenarios: list[str],
    engine: dict[str, Any],
    tier: dict[str, str] | None = None,
    late: int | str = 0,
    door: str = "command",
    **extra: str,
) -> Run:
    """Play scenarios on an engine.

    Args:
        scenarios: names of functions in `scenarios`.
        engine: arguments of `vllm.LLM`.
        tier: None for plain vLLM; else KVOFFLOAD_* variables.
        door: ``command``: through ``python -m kvoffload_patch``; ``flag``: KVOFFLOAD_ENABLE alone,
            for the start-up file; ``plugin``: the same, with the start-up file's hook taken out.
        late: how late copies happen, see `late_copies` and `late_layers`.
        extra: more environment variables.
    """
    spec = json.dumps({"engine": engine, "scenarios": scenarios, "late": late, "door": door})
    command = [sys.executable, str(HERE / "driver.py"), spec]
    env = environment(**extra)
    if tier is not None:
        env.update({"KVOFFLOAD_CPU_GIB": "0.25", **tier})
        if door == "command":
            command = [sys.executable, "-m", "kvoffload_patch", *command]
        else:
            env["KVOFFLOAD_ENABLE"] = "1"
    done = subprocess.run(
        command,
        env=env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_S,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    results = json.loads(found[-1][len("RESULT ") :]) if found else {}
    return Run(done.returncode, done.stdout, results)
