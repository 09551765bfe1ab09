"""`kvoffload top`: what happened in an interval, on a terminal, in a pipe and as JSON."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from cli.test_engines import STATUS

from kvoffload_patch.cli import engines, main, top
from kvoffload_patch.control import client

LATER = {
    **STATUS, "engine": "42-a", "seconds": 12.0, "queried_tokens": 300, "hit_tokens": 125,
    "loaded_bytes": 5 * (1 << 20) + 4_000_000, "stored_bytes": 6 * (1 << 20) + 1_000_000,
    "evicted_blocks": 27,
}  # fmt: skip
FIRST = {**STATUS, "engine": "42-a"}


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Any]]]:
    """What is found at each look; the last is followed by Ctrl-C."""
    left: list[list[dict[str, Any]]] = [[FIRST], [LATER]]

    def status() -> list[dict[str, Any]]:
        if not left:
            raise KeyboardInterrupt
        return left.pop(0)

    monkeypatch.setattr(engines, "status", status)
    monkeypatch.setattr(top.client, "find", lambda: [])  # not those that run on this machine
    monkeypatch.setattr(top.time, "sleep", lambda seconds: None)
    return left


def test_rates_are_those_of_the_interval() -> None:
    assert top.rates(FIRST, LATER) == {
        "hit_rate": 0.75, "loaded_bytes_per_second": 2e6, "stored_bytes_per_second": 5e5,
        "evicted_blocks_per_second": 10.0,
    }  # fmt: skip
    for before, now in (({}, {"error": ""}), (LATER, LATER), ({"error": "x"}, LATER)):
        assert top.rates(before, now) == {}


def test_once_is_one_table(samples: Any, capsys: Any) -> None:
    assert main.main(["top", "--once"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "ENGINE" and len(row) <= 100
    assert row.split() == [
        "42-a", "on", "25%", "1.00", "75%", "42%", "2.0", "0.5", "10", "1", "2", "0", "s",
    ]  # fmt: skip


def test_a_pipe_gets_no_codes_and_ctrl_c_is_no_error(samples: Any, capsys: Any) -> None:
    samples.append([])
    assert main.main(["top"]) == 0
    found = capsys.readouterr().out
    assert "\x1b" not in found and found.endswith("no running engine of this user has a CPU tier\n")


def as_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def test_a_terminal_is_live_and_left_as_it_was(
    samples: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    as_terminal(monkeypatch)
    assert main.main(["top"]) == 0
    shown = capsys.readouterr().out
    on, off = "\x1b[?1049h", "\x1b[?1049l"  # another screen, and back
    assert shown.count(on) == shown.count(off) == 1
    assert shown.index(on) < shown.index("q ends it") < shown.index("42-a") < shown.index(off)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminal_is_left_as_it_was_by_a_signal_as_well(
    number: int, samples: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `timeout 10 kvoffload top` sends one."""
    pytest.importorskip("rich")
    as_terminal(monkeypatch)
    caught: list[int] = []
    before = signal.signal(number, lambda *_: caught.append(number))  # what would end the tests
    monkeypatch.setattr(top.time, "sleep", lambda _: signal.raise_signal(number))
    try:
        with pytest.raises(SystemExit) as ended:
            main.main(["top"])
        signal.raise_signal(number)
    finally:
        signal.signal(number, before)
    assert ended.value.code == 128 + number and caught == [number]
    shown = capsys.readouterr().out
    assert shown.index("\x1b[?1049h") < shown.index("\x1b[?1049l")
    assert shown.index("\x1b[?25l") < shown.index("\x1b[?25h")  # the cursor


@pytest.mark.parametrize(("encoding", "columns"), [("ascii", "100"), ("utf-8", "40")])
def test_a_terminal_that_cannot_draw_gets_tables(
    encoding: str, columns: str, samples: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(top, "_encoding", lambda: encoding)
    assert main.main(["top"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "" and "\x1b" not in shown.out
    assert shown.out.splitlines()[1].startswith("42-a")


def test_a_name_that_no_running_engine_has_is_refused_at_once(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [client.Engine(Path(), "42-a")]
    monkeypatch.setattr(engines, "status", lambda: [FIRST])
    monkeypatch.setattr(top.client, "find", lambda: found)
    assert main.main(["top", "--engine", "99"]) == 2
    assert "--engine is '99', expected one of 42-a" in capsys.readouterr().err


@pytest.mark.parametrize("others", [[], [client.Engine(Path(), "7-b")]])
def test_an_engine_that_was_named_and_has_ended_is_not_waited_for(
    others: list[client.Engine], samples: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = {**LATER, "engine": "7-b"}
    samples[:] = [[FIRST], [LATER], [started] if others else [], [started]]
    monkeypatch.setattr(top.client, "find", lambda: others)
    assert main.main(["top", "--engine", "42"]) == 2
    shown = capsys.readouterr()
    assert "42-a" in shown.out and "7-b" not in shown.out and "no running" not in shown.out
    expected = "--engine is '42', expected one of 7-b;" if others else "expected a running engine"
    assert expected in shown.err


def test_a_terminal_without_rich_gets_tables_and_a_hint(
    samples: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_terminal(monkeypatch)
    monkeypatch.setitem(sys.modules, "kvoffload_patch.cli.live", None)
    assert main.main(["top"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "kvoffload_patch: a live view needs rich, found none; pip install rich.\n"
    assert "\x1b" not in shown.out and shown.out.splitlines()[1].startswith("42-a")


def test_json_is_an_object_a_line(samples: Any, capsys: Any) -> None:
    assert main.main(["top", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    (found,) = json.loads(line)["engines"]
    assert found["engine"] == "42-a" and found["rates"]["hit_rate"] == 0.75


def test_states_and_what_is_wrong_are_shown() -> None:
    found = [
        {**LATER, "growing": True, "rates": {}},
        {**LATER, "engine": "7-b", "state": "failed", "reason": "a fault", "rates": {}},
        {"engine": "8-c", "error": "does not answer", "rates": {}},
    ]
    lines = top.table(found).splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["42-a", "on+"], ["7-b", "failed"], ["8-c", "silent"],
    ]  # fmt: skip
    assert lines[4:] == ["7-b: a fault", "8-c: does not answer"]


def test_one_engine_may_be_asked_for(samples: Any, capsys: Any) -> None:
    samples[:] = [[], [{**LATER, "engine": "7-b"}, LATER]]
    assert main.main(["top", "--once", "--engine", "42", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["engines"]
    assert found["engine"] == "42-a"


def test_once_without_an_engine_is_refused(
    samples: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top.client, "find", lambda: [])
    samples[:] = [[], []]
    assert main.main(["top", "--once"]) == 2
    assert (
        "expected a running engine of this user with a CPU tier, found none in "
        in capsys.readouterr().err
    )
    running = [client.Engine(Path(), "42-a")]
    monkeypatch.setattr(top.client, "find", lambda: running)
    samples[:] = [[FIRST], [FIRST]]
    assert main.main(["top", "--once", "--json", "--engine", "7"]) == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["engines"] == []
    assert "--engine is '7', expected one of 42-a; see `kvoffload status`." in shown.err


@pytest.mark.parametrize("text", ["0", "-1", "nan", "1e9", "x", "1_0", "\u0661"])
def test_an_interval_is_a_number_of_seconds(text: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["top", "--interval", text])
    assert ended.value.code == 2 and "expected 0.1 to 3600 seconds" in capsys.readouterr().err
