"""Confirming a launch's token: seen from outside, shared by forks, and not by other programs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvoffload_patch import launch_token
from kvoffload_patch.launch_token import ATTACHED, DECIDED, VARIABLE, confirmed

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")

CODE = """\
import os, subprocess, sys
from kvoffload_patch import launch_token
for what in sys.argv[1:]:
    launch_token.confirm(what)
    launch_token.confirm(what)
print(open("/proc/self/maps").read(), "CUT", sep="", flush=True)
if os.fork() == 0:
    print(open("/proc/self/maps").read(), "CUT", sep="", flush=True)
    os._exit(0)
os.wait()
subprocess.run(["cat", "/proc/self/maps"], close_fds=False)
"""


def maps(*confirmations: str, token: str) -> list[str]:
    """Of a process, of its fork, and of a program that it runs."""
    environ = {**os.environ, VARIABLE: token, "KVOFFLOAD_ENABLE": ""}
    command = [sys.executable, "-c", CODE, *confirmations]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return done.stdout.split("CUT")


def test_a_process_and_its_forks_have_confirmed_and_a_program_has_not() -> None:
    own, fork, program = maps(DECIDED, token="0a1b")
    assert [confirmed(DECIDED, "0a1b", text) for text in (own, fork, program)] == [
        True,
        True,
        False,
    ]
    assert own.count("0a1b") == 1
    assert not confirmed(ATTACHED, "0a1b", own) and not confirmed(DECIDED, "0a1", own)


ENDING = """\
import os, sys
from kvoffload_patch import launch_token
class Last:
    def __del__(self, open=os.open, read=os.read, write=os.write):
        maps = open("/proc/self/maps", 0)
        while text := read(maps, 1 << 16):
            write(1, text)
sys.last = Last()  # what sys holds is the last to go
launch_token.confirm("decided")
"""


def test_a_process_that_ends_slowly_has_confirmed_until_it_is_gone() -> None:
    environ = {**os.environ, VARIABLE: "0a1b", "KVOFFLOAD_ENABLE": ""}
    command = [sys.executable, "-c", ENDING]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert "[stack]" in done.stdout, done.stderr
    assert confirmed(DECIDED, "0a1b", done.stdout), "a watch would end it and blame the Python"


@pytest.mark.parametrize("token", ["", "x" * 300])
def test_without_a_token_that_can_be_shown_nothing_happens(token: str) -> None:
    own, _, _ = maps(DECIDED, ATTACHED, token=token)
    assert "kvoffload" not in own


def test_a_launch_is_told_why_engines_were_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    launch_token.tell("nobody launched this")
    token = os.urandom(8).hex()
    monkeypatch.setenv(VARIABLE, token)
    launch_token.tell("nobody listens yet")
    heard = launch_token.listen(token)
    assert heard is not None
    with heard:
        assert launch_token.listen(token) is None, "a launch within a launch"
        assert launch_token.told(heard) == []
        for text in ("one\nsentence.", "x" * 10_000, "one sentence.", "\ud800"):
            launch_token.tell(text)
        monkeypatch.setenv(VARIABLE, "another")
        launch_token.tell("of another launch")
        assert launch_token.told(heard) == ["one sentence.", "x" * 4096, "?"]
        for _ in range(10_000):  # more than it takes; the engine does not wait
            launch_token.tell("more")


def test_only_this_user_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    token = os.urandom(8).hex()
    monkeypatch.setenv(VARIABLE, token)
    heard = launch_token.listen(token)
    assert heard is not None
    with heard:
        launch_token.tell("mine")
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        assert launch_token.told(heard) == []
