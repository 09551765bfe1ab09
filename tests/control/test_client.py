"""Engines are found wherever their sockets may be, and only what is an answer is taken for one."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvoffload_patch.control import client, wire
from kvoffload_patch.control.errors import Refused
from kvoffload_patch.control.listener import Listener


def test_engines_of_all_folders_are_found(runtime: dict[str, str]) -> None:
    """A server that the system starts has no XDG_RUNTIME_DIR, and its user has one."""
    made = [Listener(dict, runtime), Listener(dict, {}), Listener(dict, runtime)]
    found = client.find(runtime)
    assert {engine.name for engine in found} == {one.name.removesuffix(".sock") for one in made}
    assert len({engine.path.parent for engine in found}) == 2
    for one in made:
        one.close()
    assert client.find(runtime) == []


@pytest.mark.parametrize("reply", [{}, {"result": 1}, {"error": "a sentence"}])
def test_an_answer_without_a_result_is_refused(
    reply: dict[str, object], runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Listener(dict, runtime)
    monkeypatch.setattr(made, "_reply", lambda connection: wire.receive(connection, 100) and reply)
    with pytest.raises(Refused, match=str(reply.get("error", "found neither"))):
        client.ask(client.find(runtime)[0], "status")
    made.close()


@pytest.mark.parametrize("sent", [b"", b"x", b"[]\n", b"\xff\n", b"x" * 70_000, b'{"error": 3}\n'])
def test_what_is_no_answer_is_said_with_what_to_do(
    sent: bytes, runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Listener(dict, runtime)

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError, Refused):  # who looks for engines asks nothing
            wire.receive(connection, 100)
            connection.sendall(sent)

    monkeypatch.setattr(made, "_serve", answer)
    with pytest.raises(Refused, match="ask again, and if that does not help"):
        client.ask(client.find(runtime)[0], "status")
    made.close()


def test_an_engine_that_has_gone_meanwhile_is_said_with_what_to_do(runtime: dict[str, str]) -> None:
    made, other = Listener(dict, runtime), Listener(dict, runtime)
    found = {engine.name: engine for engine in client.find(runtime)}
    made.close()
    with pytest.raises(Refused, match="without it; start the server again, or see by `kvoffload"):
        client.ask(found[made.name.removesuffix(".sock")], "status")
    other.close()


def test_a_server_that_does_not_answer_is_not_waited_for_long(
    runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "STATUS_S", 0.05)
    over = threading.Event()
    made = Listener(lambda command: {"waited": over.wait(60)}, runtime)
    with pytest.raises(Refused, match="within 0.05 s"):
        client.ask(client.find(runtime)[0], "status")
    over.set()
    made.close()


def test_a_server_that_is_silent_is_not_asked_to_change_anything(
    runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process that is stopped: a change is waited for longer than a status."""
    monkeypatch.setattr(client, "STATUS_S", 0.05)
    asked: list[str] = []
    come, over = threading.Event(), threading.Event()

    def answer(command: Any) -> dict[str, Any]:
        asked.append(command.name)
        come.set()
        return {"waited": over.wait(60)}

    made = Listener(answer, runtime)
    (engine,) = client.find(runtime)
    with pytest.raises(Refused) as caught:
        client.ask(engine, "pause")
    assert come.wait(60), "also one that is slow reads what it was asked"
    over.set()
    made.close()
    assert asked == ["status"]
    said = str(caught.value)
    assert said.startswith(f"expected engine {engine.name} to answer within 0.05 s, found that")
    assert f"`ps -o stat,time,cmd {os.getpid()}`" in said and said.endswith("restart the server.")


def test_a_folder_that_is_open_to_others_is_named(runtime: dict[str, str]) -> None:
    made = Listener(dict, runtime)
    assert client.not_looked_into(runtime) == []
    (engine,) = client.find(runtime)
    engine.path.parent.chmod(0o755)
    assert client.find(runtime) == []
    (said,) = client.not_looked_into(runtime)
    assert said.startswith(f"expected {engine.path.parent} to be open to user ")
    assert said.endswith("; set its mode to 700.")
    engine.path.parent.chmod(0o700)
    made.close()


def test_what_is_in_the_place_of_a_folder_is_named(runtime: dict[str, str]) -> None:
    path = Path(runtime["XDG_RUNTIME_DIR"]) / "kvoffload"
    for make in (path.touch, lambda: path.symlink_to("/")):
        make()
        (said,) = client.not_looked_into(runtime)
        assert said.startswith(f"expected {path} to be a folder of sockets, found something else; ")
        path.unlink()
    assert client.not_looked_into(runtime) == []


def test_where_there_is_no_folder_there_is_no_engine(tmp_path: Path) -> None:
    assert client.find({"XDG_RUNTIME_DIR": str(tmp_path / "none")}) == client.find({})
