"""The live view of `kvoffload top`: what a terminal shows, and what was before."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
from cli.test_top import LATER

pytest.importorskip("rich")

from rich.console import Console

from kvoffload_patch.cli import engines, live, top
from kvoffload_patch.control import client

RATES = {
    "hit_rate": 0.75, "loaded_bytes_per_second": 2e6, "stored_bytes_per_second": 0.0,
    "evicted_blocks_per_second": 10.0,
}  # fmt: skip
ONE = {**LATER, "rates": RATES}


def shown(view: live.View, found: list[dict[str, Any]]) -> list[str]:
    """The lines below the head, on a terminal of 80 columns."""
    file = io.StringIO()
    Console(file=file, width=80).print(view.rendered(found))
    _, *lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    return lines


def view(height: int = 40) -> live.View:
    return live.View(top.table, Console(file=io.StringIO(), width=80, height=height))


def test_an_engine_is_some_lines() -> None:
    title, *rows = shown(view(), [ONE])
    assert title == "engine 42-a: on, model m" and 1 + len(rows) == live.LINES
    for row, words in zip(rows, (
        ["used", "25% of 1.00 GiB"],
        ["hits", "▆", "75% now, 42% since it started"],
        ["loads", "█", "2.0 MB/s"],
        ["stores", "0.0 MB/s, 10 blocks/s evicted"],
        ["now", "0 loads, 4 stores", "1 parked, last step 0 s ago, 2 failed"],
    )):  # fmt: skip
        assert [word for word in words if word not in row] == []


def test_what_was_is_kept_for_some_looks() -> None:
    kept = view()
    for _ in range(live.SAMPLES + 5):
        _, _, hits, *_ = shown(kept, [ONE])
    assert hits.count("▆") == live.SAMPLES
    _, _, hits, loads, *_ = shown(kept, [{**ONE, "rates": {}}])
    assert hits.count("▆") == loads.count("█") == live.SAMPLES - 1
    assert "0% now" in hits


def test_states_and_what_is_wrong_are_shown() -> None:
    found = [
        {**ONE, "growing": True},
        {**ONE, "engine": "7-b", "state": "failed", "reason": "a fault"},
        {"engine": "8-c", "error": "does not answer", "rates": {}},
    ]
    lines = shown(view(), found)
    assert [line for line in lines if line.startswith("engine")] == [
        "engine 42-a: on, growing, model m",
        "engine 7-b: failed, a fault",
        "engine 8-c: silent, does not answer",
    ]


def test_a_terminal_that_is_not_high_enough_has_a_line_for_each() -> None:
    found = [{**ONE, "engine": f"{number}-a"} for number in range(5)]
    lines = shown(view(height=24), found)
    assert [line.split()[0] for line in lines] == ["ENGINE", *(f"{n}-a" for n in range(5))]
    assert len(shown(view(height=31), found)) == 5 * live.LINES


def test_without_engines_it_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, said in ([], engines.NONE_RUNS), (["set its mode to 700."], "set its mode to 700."):
        monkeypatch.setattr(client, "not_looked_into", lambda told=wrong: told)
        assert shown(view(), []) == [said, "one that starts is shown"]


@pytest.mark.parametrize(
    ("values", "most", "text"),
    [
        ([0.0, 0.5, 1.0], 1.0, " ▄█"),
        ([0.001], 1.0, "▁"),
        ([3.0, 9.0], 9.0, "▃█"),
        ([0.0], 0.0, " "),
    ],
)
def test_levels(values: list[float], most: float, text: str) -> None:
    assert live.levels(values, most) == text


def test_ctrl_z_leaves_the_terminal_to_the_shell() -> None:
    """As a shell sees it: the screen and the cursor are its own while the process is stopped."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    command = [sys.executable, "-m", "kvoffload_patch", "top", "--interval", "0.1"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ) as top_:
        os.close(theirs)
        try:
            read_until(ours, "q ends it")
            for _ in range(2):
                top_.send_signal(signal.SIGTSTP)
                left = read_until(ours, "\x1b[?1049l")
                assert "\x1b[?25h" in left
                assert os.WIFSTOPPED(os.waitpid(top_.pid, os.WUNTRACED)[1])
                top_.send_signal(signal.SIGCONT)
                read_until(ours, "\x1b[?1049h")
                read_until(ours, "q ends it")
            top_.send_signal(signal.SIGINT)
            assert top_.wait(60) == 0
        finally:
            top_.kill()
    os.close(ours)


def test_q_ends_it_at_once_and_other_keys_do_not() -> None:
    """As in a terminal of its own, whose modes are as before afterwards."""
    pid, ours = pty.fork()
    if not pid:
        environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        code = (
            "import sys, termios; from kvoffload_patch.cli import top\n"
            "before = termios.tcgetattr(0); ended = top.main(['--interval', '0.2'])\n"
            "sys.exit(ended or termios.tcgetattr(0) != before)"
        )
        os.execve(sys.executable, [sys.executable, "-c", code], environ)
    try:
        read_until(ours, "q ends it")
        os.write(ours, b"x\n")
        read_until(ours, "q ends it")
        os.write(ours, b"q")
        read_until(ours, "\x1b[?1049l")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.close(ours)


def read_until(terminal: int, text: str) -> str:
    """What a terminal has been sent, up to a text and a little more."""
    found = ""
    while text not in found:
        assert select.select([terminal], [], [], 60)[0], f"no {text!r} in {found!r}"
        found += os.read(terminal, 65536).decode()
    return found
