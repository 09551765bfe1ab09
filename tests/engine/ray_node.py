"""Nodes of Ray on this machine: told that they have devices, or with a GPU each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from engine import engines, nodes

from kvoffload_patch.cli.bench.server import HOST, free_port

# Ray takes the address of this machine for 127.0.0.1; each of its nodes needs another one.
OTHER_HOST = "127.0.0.2"
START_LIMIT_S, ASK_LIMIT_S, END_S = 240.0, 45.0, 30.0
# Of processes that are told that they have devices, and where Python looks for what these need.
ON_CPU = {"TEST_RAY_ON_CPU": "1"}, Path(__file__).parent / "on_ray"
_STARTED = "Ray runtime started."
_COUNT = (
    "import ray; ray.init(log_to_driver=False);"
    " print('up:', sum(node['Alive'] for node in ray.nodes()))"
)


class RayNode:
    """There within the ``with``; its processes know nothing of the tier.

    Args:
        folder: for what it writes; its path is short, because sockets lie below it.
        devices: how many it is told it has.
        first: the node that it joins, on what looks like a host of its own; None: it is the first.
        how: more variables of its processes, and a folder in which their Python looks first.

    Attributes:
        environment: what an engine's environment has besides to use it.
    """

    def __init__(
        self,
        folder: Path,
        devices: int = 2,
        first: RayNode | None = None,
        how: tuple[Mapping[str, str], Path] = ON_CPU,
    ) -> None:
        self._log, self._first = folder / f"node{int(first is not None)}.log", first
        self._port: int = first._port if first else free_port()
        host = OTHER_HOST if first else HOST
        self.environment = {
            "RAY_ADDRESS": f"{HOST}:{self._port}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "VLLM_HOST_IP": host,
            **how[0],
        }
        env = engines.environment(**self.environment)
        self._env = {**env, "PYTHONPATH": os.pathsep.join([str(how[1]), env["PYTHONPATH"]])}
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        start += ["--node-ip-address", host, "--num-cpus", "2", "--num-gpus", str(devices)]
        # 0: any. Ray's own range for workers has ports that `free_port` gives.
        start += ["--min-worker-port", "0", "--max-worker-port", "0"]
        start += ["--object-store-memory", "100000000"]
        # Ray's own name for a node has another address; vLLM asks for its engine's by this one.
        start += ["--resources", json.dumps({f"node:{host}": 1})]
        if first:
            self._command = [*nodes.APART, *start, "--address", self.environment["RAY_ADDRESS"]]
        else:
            start += ["--head", "--port", str(self._port), "--temp-dir", str(folder)]
            self._command = [*start, "--include-dashboard", "false"]

    def __enter__(self) -> RayNode:
        with self._log.open("wb") as out:
            self._node = subprocess.Popen(
                self._command, env=self._env, stdout=out, stderr=out, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    @property
    def pid(self) -> int:
        """Of a joined node: of the process with which all of it ends, as if it lost its power."""
        return self._node.pid

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._first is None:
            self._node.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._node.wait(END_S)
        self._node.kill()
        self._node.wait(END_S)

    def _wait(self) -> None:
        """Until it says that it is up, and is seen: before, a client can wait for minutes."""
        until, said = time.monotonic() + START_LIMIT_S, ""
        while time.monotonic() < until and self._node.poll() is None:
            time.sleep(0.2)
            said = self._log.read_text(encoding="utf-8", errors="replace")
            if _STARTED not in said:
                continue
            found = self._ask()
            if f"up: {2 if self._first else 1}" in found.stdout:
                return
            said += found.stderr
        raise TimeoutError(f"Ray is not up after {START_LIMIT_S:g} s, or has ended: {said[-2000:]}")

    def _ask(self) -> subprocess.CompletedProcess[str]:
        asked = [sys.executable, "-c", _COUNT]
        try:
            return subprocess.run(
                asked, env=self._env, capture_output=True, text=True, timeout=ASK_LIMIT_S
            )
        except subprocess.TimeoutExpired as error:
            return subprocess.CompletedProcess(asked, 1, "", str(error))
