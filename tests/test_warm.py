"""Processes that engines of tests are forked from, with a few lines in place of vLLM."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine.warm import Forked, WarmProcess
from sandbox import ROOT

PROGRAM = """
import os, socket, sys, time
from engine import forking
print("began", flush=True)
asked = forking.Forking(socket.socket(fileno=int(sys.argv[1]))).serve()
if asked is not None:
    os.setsid()
    with open(asked["log"], "w") as log:
        print(os.getppid(), asked["env"]["NAME"], file=log)
    while asked["spec"]["until"] and not os.path.exists(asked["spec"]["until"]):
        time.sleep(0.01)
    os._exit(asked["spec"]["status"])
"""
NEVER = "/no/such/file"
Start = Callable[..., WarmProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """One of the processes of a folder, as a worker of pytest-xdist gets it."""
    made = []

    def started(program: str = PROGRAM) -> WarmProcess:
        command = [sys.executable, "-c", program]
        env = {"PYTHONPATH": str(ROOT / "tests")}
        made.append(WarmProcess(command, env, tmp_path, tmp_path, "warm"))
        return made[-1]

    yield started
    for one in made:
        one.close()


def played(warm: WarmProcess, name: str, status: int = 0, until: str = "") -> tuple[int, str]:
    """``until``: the path of a file, after which the child ends; empty: it ends at once."""
    return warm.play({"status": status, "until": until}, {"NAME": name}, 60)


def wait_until(so: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_workers_share_one_process_until_the_last_has_ended(start: Start, tmp_path: Path) -> None:
    first, second = start(), start()
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(played, first, "a", 3, str(tmp_path / "go on"))
        status, log = played(second, "b")
        assert status == 0
        (tmp_path / "go on").touch()
        assert slow.result()[0] == 3
    parent, name = slow.result()[1].split()
    assert name == "a" and log.split() == [parent, "b"]
    first.close()
    assert played(second, "c")[1].split() == [parent, "c"]
    assert (tmp_path / "warm.log").read_text() == "began\n"
    second.close()
    assert first._started is not None and first._started.wait(10) == 0
    third = start()
    assert played(third, "d")[1].split()[0] != parent


def test_one_that_does_not_come_up_is_told_with_what_it_has_printed(start: Start) -> None:
    assert played(start("print('no vLLM'); raise SystemExit(4)"), "a") == (4, "no vLLM\n")


def test_what_nobody_waits_for_any_more_is_ended(start: Start, tmp_path: Path) -> None:
    warm, log = start(), tmp_path / "log"
    forked = warm.fork({"status": 0, "until": NEVER}, {"NAME": "a"}, log)
    assert forked is not None and forked.poll() is None
    wait_until(lambda: log.exists() and log.read_text())
    process = Path(f"/proc/{forked.pid}")
    del forked
    wait_until(lambda: not process.exists())


def test_what_takes_too_long_is_ended(start: Start) -> None:
    warm = start()
    with pytest.raises(TimeoutError, match=r"an engine took 0\.3 s"):
        warm.play({"status": 0, "until": NEVER}, {"NAME": "a"}, 0.3)
    assert played(warm, "b", 5)[0] == 5


def test_one_that_has_ended_before_its_pid_is_read_has_a_status() -> None:
    here, there = socket.socketpair()
    there.sendall(b"123456789\n3\n")
    forked = Forked(here)
    assert (forked.pid, forked.wait(0)) == (123456789, 3)
    there.close()
