"""A node of Ray on this machine, which it is told has two devices."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from engine import engines

from kvoffload_patch.cli.bench.server import HOST, free_port

START_LIMIT_S, ASK_LIMIT_S, END_S = 240.0, 45.0, 30.0
_COUNT = "import ray; ray.init(log_to_driver=False); print('up:', len(ray.nodes()))"


class RayNode:
    """There within the ``with``; its processes know nothing of the tier.

    Args:
        folder: for what it writes; its path is short, because sockets lie below it.

    Attributes:
        environment: what an engine's environment has besides to use it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.environment = {
            "RAY_ADDRESS": f"{HOST}:{self._port}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "TEST_RAY_ON_CPU": "1",
            "VLLM_HOST_IP": HOST,
        }
        env = engines.environment(**self.environment)
        found = [str(Path(__file__).parent / "on_ray"), env["PYTHONPATH"]]
        self._env = {**env, "PYTHONPATH": os.pathsep.join(found)}

    def __enter__(self) -> RayNode:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        command += ["--port", str(self._port), "--node-ip-address", HOST, "--num-cpus", "2"]
        command += ["--num-gpus", "2", "--object-store-memory", "100000000"]
        command += ["--include-dashboard", "false", "--temp-dir", str(self._folder)]
        with (self._folder / "node.log").open("wb") as out:
            self._node = subprocess.Popen(
                command, env=self._env, stdout=out, stderr=out, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._node.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._node.wait(END_S)
        self._node.kill()

    def _wait(self) -> None:
        until, said = time.monotonic() + START_LIMIT_S, ""
        while time.monotonic() < until:
            found = self._ask()
            if "up: 1" in found.stdout:
                return
            said = found.stderr
            time.sleep(1)
        raise TimeoutError(f"Ray is not up after {START_LIMIT_S:g} s: {said}")

    def _ask(self) -> subprocess.CompletedProcess[str]:
        """A client that comes while the node is half up can wait for longer than the node takes."""
        asked = [sys.executable, "-c", _COUNT]
        try:
            return subprocess.run(
                asked, env=self._env, capture_output=True, text=True, timeout=ASK_LIMIT_S
            )
        except subprocess.TimeoutExpired as error:
            return subprocess.CompletedProcess(asked, 1, "", str(error))
