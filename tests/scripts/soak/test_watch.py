"""Files that ranks share are found by who holds them; those of engines that have ended are left."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time

import pytest

from kvoffload_patch.integration.shared_files import SharedFile
from scripts import ROOT
from scripts.soak.watch import files_left, shared_files

# A rank that keeps a file of its engine, open alone or mapped alone, until its input ends.
RANK = """
import mmap, os, sys
from kvoffload_patch.integration.shared_files import SharedFileAddress

how, path, name = sys.argv[1:]
held = SharedFileAddress(path, name, (0,)).open()
if how == "mapped":
    memory = mmap.mmap(held, 0)  # which has a descriptor of its own
    for number in range(3, 64):
        if os.path.islink(f"/proc/self/fd/{number}"):
            if os.readlink(f"/proc/self/fd/{number}") == name:
                os.close(number)
print("held", flush=True)
sys.stdin.read()
os._exit(0)
"""
# An engine that makes a file and starts a rank, which outlives it.
ENGINE = f"""
import subprocess, sys
from kvoffload_patch.integration.shared_files import SharedFile

file = SharedFile([0])
file.resize(4096)
print(file.address.name, flush=True)
words = [sys.argv[1], file.address.path, file.address.name]
subprocess.Popen([sys.executable, "-c", {RANK!r}, *words])
sys.stdin.read()
"""


def name_of(address: str) -> str:
    return address.removeprefix("/memfd:").split(" ")[0]


def test_a_file_is_found_until_it_is_closed() -> None:
    file = SharedFile([0, 1])
    name = name_of(file.address.name)
    assert name in shared_files([os.getpid()]) and name in shared_files()
    assert name not in shared_files([os.getppid()])
    assert name not in files_left(), "its engine, this process, has not ended"
    file.close()
    assert name not in shared_files()
    assert shared_files([1 << 30]) == [], "no such process"


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_what_a_rank_keeps_of_an_engine_that_has_ended_is_left(how: str) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert engine.stdin and engine.stdout
    name = name_of(engine.stdout.readline())
    assert engine.stdout.readline() == "held\n"
    assert name in shared_files() and name not in files_left()
    engine.kill()
    assert engine.wait(30) == -signal.SIGKILL
    assert name in files_left()
    assert name not in shared_files([engine.pid])
    engine.stdin.close()  # the rank reads the same pipe
    until = time.monotonic() + 30
    while name in shared_files() and time.monotonic() < until:
        time.sleep(0.05)
    assert name not in files_left()
    engine.stdout.close()


def test_the_page_by_which_a_process_confirms_its_launch_is_none() -> None:
    before = shared_files([os.getpid()])
    file = os.memfd_create("kvoffload_patch:decided:0123")
    os.ftruncate(file, mmap.PAGESIZE)
    with mmap.mmap(file, mmap.PAGESIZE):
        assert shared_files([os.getpid()]) == before
    os.close(file)
