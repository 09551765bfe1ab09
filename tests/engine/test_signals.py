"""SIGTERM and SIGKILL to each process of a server in each phase: it ends and leaves nothing.

SIGINT is sent to its first process. `scripts/soak signals` makes all these trials beside plain
vLLM, one after the other, with servers that start as a user's do. Here they are made side by side,
on servers forked from one process. What vLLM's API server does with its connections then, and what
a process does that is yet to install its handlers, differs from try to try: that the tier's
processes end is asked where vLLM ends them.
"""

from __future__ import annotations

import itertools
import re
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from engine.engines import WarmProcesses
from engine.forked_servers import Server
from engine.shared_memory import files_left

from kvoffload_patch.control import client
from scripts.soak import signals, watch
from scripts.soak.watch import is_dead, shared_files

SIDE_BY_SIDE = 8
TARGETS = ("server", "engine", "rank1")
CASES = [
    (phase, target, kind)
    for phase, target, kind in itertools.product(signals.PHASES, TARGETS, signals.SIGNALS)
    if target == "server" or kind != "INT"  # `scripts/soak signals` sends it to the others, too
]
NAMES = [" ".join(case) for case in CASES]
# What ends: all of an idle server, and the engine core with its workers if one of them is hit.
ALL_END = [name for name in NAMES if name.startswith("idle") and name != "idle server KILL"]
TIERS_END = [name for name in NAMES if name.startswith(("streaming engine", "streaming rank1"))]
# Where vLLM may go on for as long as it likes, it is killed after this.
ALLOWED_S = 2.0
# On a machine that has much else to do; seconds otherwise.
LIMIT_S = 2 * signals.LIMIT_S


class Trials:
    """One trial for each case, and what they left."""

    def __init__(self, folder: Path, runtime: Path, model: Path, warm: WarmProcesses) -> None:
        self._folder, self._model, self._warm = folder, model, warm
        self._choosing, self._ports = threading.Lock(), set[int]()
        before = watch.files_left()
        self._env = {
            "XDG_RUNTIME_DIR": str(runtime), "KVOFFLOAD_CONTROL": "1",
            "KVOFFLOAD_CPU_GIB": "0.05", "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }  # fmt: skip
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            self.found = dict(zip(NAMES, pool.map(self._trial, CASES)))
        self.sockets = [path.name for path in runtime.rglob("*.sock")]
        client.find({"XDG_RUNTIME_DIR": str(runtime)})  # as any command of ours
        self.sockets_after_a_command = [path.name for path in runtime.rglob("*.sock")]
        self.files = files_left(before)

    def log(self, name: str) -> str:
        """What the server of a trial printed."""
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def _trial(self, case: tuple[str, str, str]) -> dict[str, Any]:
        phase, target, kind = case
        name = " ".join(case)
        server = self._server(self._folder / f"{name}.log")
        server.start()
        try:
            first = "engine" if (phase, target) == ("starting", "server") else target
            if phase == "starting":
                assert signals.wait_until(lambda: signals.aim_of(server.pid, first), LIMIT_S)
            else:
                server.wait()
            with signals.streaming(server) if phase == "streaming" else nullcontext():
                found = self._send(server, target, kind, name)
        finally:
            server.kill()
        gone = signals.wait_until(lambda: not signals.session_of(server.pid), LIMIT_S)
        return {**found, "gone": gone is not None}

    def _server(self, log: Path) -> Server:
        """One with a port that none beside it has; a port is free until a server listens on it."""
        with self._choosing:
            while True:
                server = Server(self._warm, self._model, log, self._env, ranks=2)
                if server.port not in self._ports:
                    self._ports.add(server.port)
                    return server

    def _send(self, server: Server, target: str, kind: str, name: str) -> dict[str, Any]:
        """A signal, what ranks shared until then, and what has ended of itself then."""
        aim, engine = signals.aim_of(server.pid, target), signals.engine_of(server.pid)
        assert aim is not None and engine is not None
        tiers = [engine.pid, *(rank.pid for rank in signals.ranks_of(server.pid))]
        shared = shared_files(tiers)
        aim.send_signal(getattr(signal, f"SIG{kind}"))
        asked = LIMIT_S if name in (*ALL_END, *TIERS_END) else ALLOWED_S
        ended = signals.wait_until(lambda: all(map(is_dead, tiers)), asked)
        status = None
        if name in ALL_END:
            status = signals.wait_until(lambda: server.status() is not None, LIMIT_S)
        return {
            "shared": shared, "tiers_ended": ended is not None, "all_ended": status is not None,
        }  # fmt: skip


@pytest.fixture(scope="module")
def trials(real: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    with tempfile.TemporaryDirectory() as runtime:  # a socket's path is short
        folder = tmp_path_factory.mktemp("signals")
        yield Trials(folder, Path(runtime), Path(real.model), real.warm)


@pytest.mark.parametrize("name", NAMES)
def test_what_vllm_ends_has_ended_and_no_process_is_left(trials: Trials, name: str) -> None:
    found = trials.found[name]
    assert found["tiers_ended"] or name not in (*ALL_END, *TIERS_END), trials.log(name)[-3000:]
    assert found["all_ended"] or name not in ALL_END, trials.log(name)[-3000:]
    assert found["gone"], "processes are left"


def test_no_file_and_no_socket_is_left(trials: Trials) -> None:
    shared = [trials.found[name]["shared"] for name in NAMES if not name.startswith("starting")]
    assert all(shared), "ranks share files while they serve, and these are not seen"
    assert trials.files == set()
    assert trials.sockets_after_a_command == []
    assert len(trials.sockets) < len(CASES), "none has taken its own away"


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("starting")])
def test_the_tier_says_nothing_to_it(trials: Trials, name: str) -> None:
    """No error of its own follows on vLLM's, or hides that.

    In a traceback of vLLM's, as of a rank whose peer has gone, are frames of our hooks, too.
    """
    ours = [line for line in trials.log(name).splitlines() if "offload" in line]
    assert any("KV offload: CPU tier of " in line for line in ours), "the tier was never on"
    assert [line for line in ours if not re.search(r'(?:^|\) )INFO \d|\] +File "', line)] == []


@pytest.mark.parametrize("phase", ["streaming", "idle"])
def test_a_dead_rank_is_vllms_own_error_which_names_it(trials: Trials, phase: str) -> None:
    said = r"ERROR .*Worker proc VllmWorker-1\S* died unexpectedly"
    assert re.search(said, trials.log(f"{phase} rank1 KILL"))
