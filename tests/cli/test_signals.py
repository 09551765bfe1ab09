"""What ends a command lets it clear up first, and only while it asks for that."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from sandbox import Sandbox

from kvoffload_patch.cli.signals import ended_in_order


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_an_exit_while_there_is_something_to_clear_up(number: int) -> None:
    caught, cleared = list[int](), list[int]()
    before = signal.signal(number, lambda *_: caught.append(number))  # what would end the tests
    try:
        with pytest.raises(SystemExit) as ended, ended_in_order():
            try:
                signal.raise_signal(number)
            finally:
                cleared.append(number)
        assert ended.value.code == 128 + number and cleared == [number] and not caught
        signal.raise_signal(number)
        assert caught == [number]
    finally:
        signal.signal(number, before)


def test_under_nohup_a_command_outlives_its_terminal(tmp_path: Path) -> None:
    box = Sandbox(tmp_path / "box")
    top = subprocess.Popen(
        ["nohup", box.python, "-m", "kvoffload_patch", "top", "--json", "--interval", "0.1"],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}, cwd=box.root,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    with top:
        assert top.stdout is not None and top.stdout.readline()
        top.send_signal(signal.SIGHUP)
        lines = [top.stdout.readline() for _ in range(20)]  # more than were written by then
        top.terminate()
    assert all(lines) and top.returncode == 128 + signal.SIGTERM
