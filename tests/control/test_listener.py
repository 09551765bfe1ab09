"""A socket of its user alone, that answers those who ask and is not held up by others."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transfer.resident import files_opened_since, kvoffload_threads, open_files

from kvoffload_patch.control import client, listener, wire
from kvoffload_patch.control import folder as folders
from kvoffload_patch.control.commands import Command
from kvoffload_patch.control.errors import Refused
from kvoffload_patch.control.listener import AT_A_TIME, COMMANDS, SILENT, Listener


def answer(command: Command) -> Mapping[str, Any]:
    """As an engine: one command is refused, and one fails."""
    if command.name == "pause":
        raise Refused("not now")
    if command.name == "empty":
        raise ZeroDivisionError("a fault")
    return {"asked": command.name, "values": command.values}


@pytest.fixture
def opened(runtime: dict[str, str]) -> Iterator[Listener]:
    made = Listener(answer, runtime)
    yield made
    made.close()
    until = time.monotonic() + 60
    while kvoffload_threads():
        assert time.monotonic() < until, "a thread is left"
        time.sleep(0.01)


def engine(runtime: dict[str, str]) -> client.Engine:
    (found,) = client.find(runtime)
    return found


def connection(runtime: dict[str, str]) -> socket.socket:
    path = engine(runtime).path
    folder = folders.open_one(path.parent)
    try:
        made = folders.connect(folder, path.name)
    finally:
        os.close(folder)
    assert made is not None
    return made


def test_it_is_found_and_answers(opened: Listener, runtime: dict[str, str]) -> None:
    found = engine(runtime)
    assert f"{found.name}.sock" == opened.name and found.name.startswith(f"{os.getpid()}-")
    assert client.ask(found, "resize", gib="2") == {"asked": "resize", "values": {"gib": 2.0}}
    mode = found.path.stat().st_mode
    assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600


def test_what_is_refused_or_fails_is_the_answer_and_the_next_is_answered(
    opened: Listener, runtime: dict[str, str]
) -> None:
    found = engine(runtime)
    for command, why in (("pause", "not now"), ("empty", "ZeroDivisionError: a fault"), ("x", "x")):
        with pytest.raises(Refused, match=why):
            client.ask(found, command)
    assert client.ask(found, "status")["asked"] == "status"


def test_an_answer_that_is_too_long_is_said_to_be_and_nothing_is_logged(
    runtime: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    made = Listener(lambda _: {"reason": "x" * wire.ANSWER_BYTES}, runtime)
    try:
        with pytest.raises(Refused, match=f"{wire.ANSWER_BYTES} bytes at most, found .*the rest"):
            client.ask(engine(runtime), "status")
    finally:
        made.close()
    assert caplog.text == ""


def test_a_silent_client_and_one_that_goes_keep_nobody_waiting(
    opened: Listener, runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MESSAGE_S", 60.0)
    silent = [connection(runtime) for _ in range(SILENT // 2)]
    gone = connection(runtime)
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    gone.close()
    began = time.monotonic()
    assert client.ask(engine(runtime), "status")["asked"] == "status"
    assert time.monotonic() - began < wire.MESSAGE_S / 2
    for one in silent:  # as few as these are not sent away either
        wire.send(one, {"command": "status"}, wire.REQUEST_BYTES)
        assert wire.receive(one, wire.ANSWER_BYTES)["result"]["asked"] == "status"
        one.close()


def test_of_more_silent_clients_than_there_may_be_the_first_go(
    opened: Listener, runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them has longer than anybody who asks waits for an answer."""
    monkeypatch.setattr(wire, "MESSAGE_S", 60.0)
    silent = [connection(runtime) for _ in range(AT_A_TIME + SILENT)]
    assert client.ask(engine(runtime), "status")["asked"] == "status"
    first, last = silent[0], silent[-1]
    assert "found its end" in wire.receive(first, wire.ANSWER_BYTES)["error"]
    wire.send(last, {"command": "status"}, wire.REQUEST_BYTES)
    assert wire.receive(last, wire.ANSWER_BYTES)["result"]["asked"] == "status"
    for one in silent:
        one.close()


def test_commands_that_the_engine_does_not_carry_out_keep_no_status_waiting(
    runtime: dict[str, str],
) -> None:
    """As of a step that hangs: what the engine says of itself is asked just then."""
    over, begun = threading.Event(), threading.Semaphore(0)

    def hangs(command: Command) -> Mapping[str, Any]:
        if command.name != "status":
            begun.release()
            over.wait(60)
        return {"asked": command.name}

    made = Listener(hangs, runtime)
    found = engine(runtime)
    asking = [threading.Thread(target=client.ask, args=(found, "empty")) for _ in range(COMMANDS)]
    for one in asking:
        one.start()
    for _ in asking:
        assert begun.acquire(timeout=60)
    for _ in range(AT_A_TIME):
        assert client.ask(found, "status") == {"asked": "status"}
    with pytest.raises(Refused, match=f"fewer than {COMMANDS} commands under way, found as many"):
        client.ask(found, "pause")
    over.set()
    for one in asking:
        one.join(60)
    assert client.ask(found, "pause") == {"asked": "pause"}
    made.close()


def test_a_command_is_wanted_until_its_client_has_gone(runtime: dict[str, str]) -> None:
    begun, gone, seen = threading.Event(), threading.Event(), list[bool]()
    over = threading.Event()

    def looks(command: Command) -> Mapping[str, Any]:
        seen.append(command.wanted())
        begun.set()
        gone.wait(60)
        seen.append(command.wanted())
        over.set()
        return {}

    made = Listener(looks, runtime)
    one = connection(runtime)
    wire.send(one, {"command": "pause"}, wire.REQUEST_BYTES)
    assert begun.wait(60)
    one.close()
    gone.set()
    assert over.wait(60) and seen == [True, False]
    made.close()


def test_other_users_are_told_that_they_are(
    opened: Listener, runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those who ask when they were refused, and the connection is closed already."""
    mine, send = threading.current_thread(), wire.send

    def other(connection: socket.socket) -> None:
        if threading.current_thread() is not mine:
            raise Refused("another user")

    def late(*args: Any) -> None:
        if threading.current_thread() is mine:
            time.sleep(0.1)
        send(*args)

    monkeypatch.setattr(wire, "check_peer", other)
    for sends in (send, late):
        monkeypatch.setattr(wire, "send", sends)
        with pytest.raises(Refused, match="^another user$"):
            client.ask(engine(runtime), "status")


@pytest.mark.parametrize("short_of", ["descriptors", "threads"])
def test_what_is_short_for_a_while_closes_nothing(
    opened: Listener,
    runtime: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    short_of: str,
) -> None:
    """As another part of the process may open files until there are no descriptors left."""
    monkeypatch.setattr(listener, "AGAIN_S", 0.01)
    accept, taken = socket.socket.accept, listener.threading.Thread
    fails = iter(range(3))

    def short(*args: Any, **kwargs: Any) -> Any:
        if next(fails, None) is not None:
            raise OSError(errno.EMFILE, "too many")
        return (accept if short_of == "descriptors" else taken)(*args, **kwargs)

    before = client.ask(engine(runtime), "status")
    if short_of == "descriptors":
        monkeypatch.setattr(socket.socket, "accept", short)
    else:
        monkeypatch.setattr(listener.threading, "Thread", short)
    for _ in range(5):
        with suppress(Refused):  # what was taken already, and has got no thread, is closed
            client.ask(engine(runtime), "status")
    assert client.ask(engine(runtime), "status") == before
    assert next(fails, None) is None
    assert caplog.text.count("was not taken") == 1


def test_closing_leaves_nothing_and_comes_twice(runtime: dict[str, str]) -> None:
    made = Listener(answer, runtime)
    found = engine(runtime)
    made.close()
    made.close()
    assert not found.path.parent.exists() and client.find(runtime) == []
    with pytest.raises(Refused, match="expected engine .* to answer"):
        client.ask(found, "status")


@pytest.mark.parametrize(
    ("owner", "names"),
    [(os, ("chmod", "fchmod")), (socket.socket, ("listen",))],
    ids=["mode", "listen"],
)
def test_nothing_is_left_where_it_cannot_be_made(
    runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch, owner: Any, names: tuple[str, ...]
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError("not here")

    before = open_files()
    for name in names:
        monkeypatch.setattr(owner, name, refused)
    with pytest.raises(PermissionError, match="not here"):
        Listener(answer, runtime)
    assert not files_opened_since(before)
    assert not (Path(runtime["XDG_RUNTIME_DIR"]) / "kvoffload").exists(), "its file is there"


def test_its_file_is_never_open_to_others(
    runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    bind = Listener._bind

    def look(made: Listener, folder: int) -> None:
        bind(made, folder)
        found.append(stat.S_IMODE(os.stat(made.name, dir_fd=folder).st_mode))

    monkeypatch.setattr(Listener, "_bind", look)
    Listener(answer, runtime).close()
    assert found == [0o600]


def test_where_nothing_can_be_made_in_a_folder_that_is_there_the_next_is_taken(
    runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that is full, or cannot be written to any more."""
    first, second = folders.candidates(runtime)
    as_made = folders.address

    def address(folder: int, name: str) -> str:
        if Path(os.readlink(f"/proc/self/fd/{folder}")) == first:
            raise OSError(errno.ENOSPC, "no space")
        return as_made(folder, name)

    before = open_files()
    monkeypatch.setattr(folders, "address", address)
    made = Listener(answer, runtime)
    found = engine(runtime)
    assert found.path.parent == second and not first.exists()
    assert client.ask(found, "status")["asked"] == "status"
    made.close()
    assert not files_opened_since(before)


def test_nothing_is_left_where_there_is_no_thread_to_answer(
    runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = open_files()
    monkeypatch.setattr(threading.Thread, "start", none_left)
    with pytest.raises(RuntimeError, match="new thread"):
        Listener(answer, runtime)
    assert not files_opened_since(before)
    assert not (Path(runtime["XDG_RUNTIME_DIR"]) / "kvoffload").exists()


def test_the_socket_of_a_killed_process_is_removed(runtime: dict[str, str]) -> None:
    code = (
        "import os, sys\n"
        "from kvoffload_patch.control.listener import Listener\n"
        f"Listener(dict, {runtime!r})\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert done.returncode == -9
    folder = Path(runtime["XDG_RUNTIME_DIR"]) / "kvoffload"
    assert len(list(folder.iterdir())) == 1
    assert client.find(runtime) == [] and not folder.exists()


FORKING = """
import os, sys
from kvoffload_patch.control.listener import Listener

made = Listener(lambda command: {{"pid": os.getpid()}}, {runtime!r})
print("made", flush=True)
sys.stdin.readline()
if not os.fork():
    made.close()
    print("closed", flush=True)
sys.stdin.read()
"""


def test_a_forked_process_keeps_nothing_of_the_socket_and_takes_nothing_away(
    runtime: dict[str, str],
) -> None:
    """An engine in its user's own process: that may fork whenever it likes."""
    code = FORKING.format(runtime=runtime)
    command = [sys.executable, "-W", "ignore", "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "made\n"
        silent = connection(runtime)
        status = {"pid": process.pid}
        assert client.ask(engine(runtime), "status") == status, "and the other has been taken"
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "closed\n"
        assert client.ask(engine(runtime), "status") == status
        process.kill()
        process.wait(60)
        silent.settimeout(60)
        assert silent.recv(1) == b"", "the other end is open in the forked process"
        silent.close()
        assert client.find(runtime) == []
        process.stdin.close()
        assert process.stdout.read() == "", "the forked process has ended"
