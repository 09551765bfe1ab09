"""The second node of an engine: `vllm serve --headless`, on what looks like a host of its own.

It has a host name, processes and shared memory of its own, and the network of this machine.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from engine import engines, release

from kvoffload_patch.cli.bench.server import HOST, free_port

NAME = "second-node"
_UNSHARE = ["unshare", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child"]
_ARRIVE = f'hostname {NAME} && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
# What a command begins with that is to run there. Once it is killed, all that it has started ends.
APART = [*_UNSHARE, "--mount-proc", "sh", "-c", _ARRIVE, "sh"]
_END_S, _LATER_S = 10.0, 30.0


def why_not() -> str:
    """Why there can be no second node here; empty if there can."""
    if "nnodes" not in release.source("config/parallel.py"):
        return "vLLM of this release has one node only, without Ray"
    return why_no_host()


def why_no_host() -> str:
    """Why there can be nothing here that looks like another host; empty if there can."""
    if shutil.which("unshare") is None:
        return "this system has no unshare"
    tried = subprocess.run([*APART, "true"], capture_output=True)
    return "" if tried.returncode == 0 else "this user may make no host name of its own"


class SecondNode:
    """There within the ``with``.

    Args:
        engine: arguments of the first node's `vllm.LLM`, but for those of `first`.
        log: file for what it prints.
        tier: KVOFFLOAD_* variables; None: plain vLLM.
        late: how late copies happen, see `late_copies`.
    """

    def __init__(
        self, engine: dict[str, Any], log: Path, tier: dict[str, str] | None, late: int = 0
    ) -> None:
        port = str(free_port())
        through = [sys.executable, "-m", "kvoffload_patch"] if tier is not None else []
        self._command = [
            *APART, *through, sys.executable, str(Path(__file__).parent / "forked_server.py"),
            "serve", engine["model"], "--headless", "--node-rank", "1", *_both(port), *_as_driver(),
        ]  # fmt: skip
        self._env = engines.environment(
            **(tier or {}), VLLM_HOST_IP=HOST, TEST_LATE=str(late), **release.environment(2)
        )
        self._log = log
        self.first = {
            **engine, "tensor_parallel_size": 2, "nnodes": 2, "node_rank": 0,
            "master_addr": HOST, "master_port": int(port),
        }  # fmt: skip

    def __enter__(self) -> SecondNode:
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        return self

    @property
    def pid(self) -> int:
        """Of the process with which all of the node's end, as if the host had lost its power."""
        return self._process.pid

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(_END_S)


def _both(port: str) -> list[str]:
    return [
        "--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", HOST,
        "--master-port", port,
    ]  # fmt: skip


def _as_driver() -> list[str]:
    """What `driver` gives its engines."""
    return [
        "--skip-tokenizer-init", "--num-gpu-blocks-override", "24", "--enforce-eager",
        "--max-model-len", "2048", "--dtype", "float32", "--seed", "0",
        "--block-size", str(release.block_size()),
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """What the first node's environment has besides."""
    return {"VLLM_HOST_IP": HOST, "TEST_FORK_WORKERS": "1"}


def assert_end_alike(
    record: Callable[[str, str], None], ends: list[dict[str, Any]], **about: str
) -> None:
    """A lost node ends both engines with the same error, which is not the tier's, and as soon.

    Args:
        record: pytest's `record_property`, for docs/features.md.
        ends: of plain vLLM, and of the one with the tier.
        about: what was lost, in words.
    """
    plain, tiered = ends
    record("lost", json.dumps({**about, "plain": plain, "tier": tiered}))
    assert all(end_alike(plain, tiered)), ends


def end_alike(plain: dict[str, Any], tiered: dict[str, Any]) -> list[bool]:
    """What must hold of two ends: the same error, which is not the tier's, and as soon."""
    return [
        plain["error"] != "",
        plain["error"] == tiered["error"],
        "kvoffload" not in tiered["said"],
        tiered["seconds"] < plain["seconds"] + _LATER_S,
    ]
