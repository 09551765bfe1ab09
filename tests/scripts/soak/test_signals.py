"""What `soak signals` makes of what it sees; servers are not started here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvoffload_patch.control.client import Engine
from scripts.soak import signals

ENDED: dict[str, Any] = {
    "ended_after_s": 2.5, "status": -15, "processes_left": [], "files_left": [],
}  # fmt: skip


class Sleeper:
    """Stands in for a server: a process with one below it, that end or do not."""

    def __init__(self, ignores: bool) -> None:
        first = "import signal; signal.signal(15, signal.SIG_IGN);" if ignores else ""
        code = f"{first}import subprocess,sys;subprocess.run([sys.executable,'-c','input()'])"
        self._code = code

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._code], stdin=subprocess.PIPE, start_new_session=True
        )
        self.pid = self._process.pid

    def wait(self) -> None:
        assert signals.wait_until(lambda: len(signals.family(self.pid)) == 2, 20) is not None

    def status(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        for process in reversed(signals.family(self.pid)):
            process.kill()
        self._process.communicate()


def test_a_process_that_ends_is_told_from_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "LIMIT_S", 0.5)
    sleeper: Any = Sleeper(ignores=False)
    monkeypatch.setattr(signals, "OTHERS_LIMIT_S", 0.2)
    found = signals.trial(sleeper, "idle", "server", signal.SIGTERM)
    assert len(found["processes_left"]) == 1, "the other one waits for input"
    assert found["status"] == -15 and found["ended_after_s"] < 0.5
    assert found["files_left"] == []
    sleeper = Sleeper(ignores=True)
    found = signals.trial(sleeper, "idle", "server", signal.SIGTERM)
    assert found["ended_after_s"] is None and found["status"] is None


TREE = """
import subprocess, sys, time
rank = "import time; time.sleep(60)"
if sys.argv[1:] == ["EngineCore"]:
    subprocess.Popen([sys.executable, "-c", rank, "resource_tracker"])
    for _ in range(2):
        subprocess.Popen([sys.executable, "-c", rank])
else:
    subprocess.Popen([sys.executable, __file__, "EngineCore"])
time.sleep(60)
"""


def test_a_rank_is_the_worker_below_the_engine_core(tmp_path: Path) -> None:
    script = tmp_path / "tree.py"
    script.write_text(TREE)
    first = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    try:
        assert signals.wait_until(lambda: signals.aim_of(first.pid, "rank1"), 20) is not None
        engine = signals.aim_of(first.pid, "engine")
        ranks = [signals.aim_of(first.pid, name) for name in signals.RANKS]
        assert engine and signals.aim_of(first.pid, "server") == psutil.Process(first.pid)
        assert [one and one.ppid() for one in ranks] == [engine.pid] * 2
        assert ranks[0] and ranks[1] and ranks[0].create_time() <= ranks[1].create_time()
        assert ranks[0] != ranks[1]
        engine.kill()
        assert signals.wait_until(lambda: signals.engine_of(first.pid) is None, 20) is not None
        orphans = signals.wait_until(lambda: len(signals.session_of(first.pid)) == 4, 20)
        assert orphans is not None, "orphans count as well; a killed process ends a little later"
        assert signals.aim_of(first.pid, "rank0") is None
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()


def test_cells() -> None:
    assert signals.in_words(ENDED) == "2.5 s, status -15"
    hangs = {**ENDED, "ended_after_s": None, "files_left": ["a"]}
    assert signals.in_words(hangs) == "hangs, 1 files left"
    assert signals.in_words({**ENDED, "processes_left": [3, 4]}).endswith(", 2 processes left")
    assert signals.in_words({"error": "no"}) == "no"


@pytest.mark.parametrize(
    ("plain", "tier", "worse"),
    [
        (ENDED, ENDED, False),
        (ENDED, {**ENDED, "ended_after_s": None}, True),
        ({**ENDED, "ended_after_s": None}, {**ENDED, "ended_after_s": None}, False),
        (ENDED, {**ENDED, "files_left": ["a"]}, True),
        (ENDED, {**ENDED, "processes_left": [1]}, True),
        ({**ENDED, "processes_left": [1]}, {**ENDED, "processes_left": [2]}, False),
        ({"error": "no"}, ENDED, False),
        (ENDED, {"error": "no"}, True),
    ],
)
def test_plain_vllm_is_the_measure(plain: Any, tier: Any, worse: bool) -> None:
    assert signals.worse(plain, tier) == worse


def test_options(tmp_path: Path) -> None:
    args = signals.options(["--phases", "idle", "--signals", "TERM,KILL"])
    assert args.phases == ["idle"] and args.signals == ["TERM", "KILL"]
    assert args.targets == ["server", "engine", "rank0", "rank1"]
    with pytest.raises(SystemExit):
        signals.options(["--signals", "HUP"])


def test_trials_are_made_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str, int]] = []
    killed: list[Any] = []

    class Fake:
        def __init__(self, model: Path, log: Path, tier: Any, faults: Any, ranks: int) -> None:
            assert ranks == 1

        def kill(self) -> None:
            killed.append(self)

    def trial(server: Any, phase: str, target: str, number: int) -> dict[str, Any]:
        made.append((phase, target, number))
        if number == signal.SIGKILL:
            raise RuntimeError("no\nmore")
        return ENDED

    monkeypatch.setattr(signals, "Server", Fake)
    monkeypatch.setattr(signals, "trial", trial)
    argv = ["--phases", "idle", "--targets", "engine", "--signals", "TERM,KILL"]
    args = signals.options([*argv, "--out", str(tmp_path)])
    args.minutes = -1.0
    found = signals.earlier(tmp_path / "signals.json")
    assert signals.play(args, tmp_path, found) == 4 and made == []
    args.minutes, args.sides = 1.0, ["plain"]
    assert signals.play(args, tmp_path, found) == 0 and len(made) == 2
    args.sides = list(signals.SIDES)
    found = signals.earlier(tmp_path / "signals.json")
    assert signals.play(args, tmp_path, found) == 0 and len(made) == len(killed) == 4
    assert signals.worse_ones(found) == ["idle engine KILL"]
    assert signals.rows_of(found)[1:] == [
        ["idle engine TERM", "2.5 s, status -15", "2.5 s, status -15"],
        ["idle engine KILL", "no", "no"],
    ]
    assert {cell["package"] for cells in found["trials"].values() for cell in cells.values()} == {
        signals.machine()["package"]
    }


def test_a_socket_of_a_process_that_has_ended_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals.client, "find", lambda: [Engine(tmp_path, "7-ab")])
    assert signals.sockets_of([7]) == ["7-ab"]
    assert signals.sockets_of([8]) == []
