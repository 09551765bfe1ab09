"""Finding the engines of this user, and asking one of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffload_patch.control import folder as folders
from kvoffload_patch.control import wire
from kvoffload_patch.control.commands import STATUS
from kvoffload_patch.control.errors import Refused, Silent

# A change waits for the step under way, and for copies under way where memory is given back.
ANSWER_S = 120.0
STATUS_S = 5.0
# What is to be done about an answer that is none.
_ELSE = "ask again, and if that does not help see the server's log, and restart it."


@dataclass(frozen=True)
class Engine:
    """A socket that somebody listens on. ``name``: the process and a number of its own."""

    path: Path
    name: str

    @property
    def process(self) -> str:
        """Its process id."""
        return self.name.partition("-")[0]


def find(environ: Mapping[str, str] | None = None) -> list[Engine]:
    """The engines of this user that are alive; removes what killed ones have left."""
    found = []
    for path in folders.candidates(environ):
        with suppress(OSError, Refused):
            folder = folders.open_one(path)
            names: list[str] = []
            try:
                with suppress(Refused), folders.locked(folder):
                    folders.remove_stale(folder)
                names = folders.sockets(folder)
            finally:
                (os.close if names else folders.leave)(folder)
            found += [Engine(path / name, name.removesuffix(folders.SUFFIX)) for name in names]
    return found


def not_looked_into(environ: Mapping[str, str] | None = None) -> list[str]:
    """Why engines cannot be found in folders that there are, a sentence for each of these."""
    wrong = []
    for path in folders.candidates(environ):
        try:
            os.close(folders.open_one(path))
        except Refused as refusal:
            wrong.append(str(refusal))
        except OSError:
            if os.path.lexists(path):  # or else there is none
                text = f"expected {path} to be a folder of sockets, found something else"
                wrong.append(
                    f"{text}; remove it, and restart the servers that it was in the way of."
                )
    return wrong


def ask(engine: Engine, command: str, **arguments: str) -> dict[str, Any]:
    """The answer of an engine, which is an object of its own for each command.

    Raises:
        Refused: it does not answer, or refuses; the text is its own sentence.
    """
    if command != STATUS:
        # A change may take long: whether anybody is there at all is known sooner.
        ask(engine, STATUS)
    seconds = STATUS_S if command == STATUS else ANSWER_S
    try:
        answer = _exchange(engine, {"command": command, **arguments}, seconds)
    except Silent:
        raise Refused(
            f"expected engine {engine.name} to answer within {seconds:g} s, found that it did not; "
            f"see by `ps -o stat,time,cmd {engine.process}` whether its process is stopped (T) or "
            "busy, and continue it (`kill -CONT`) or restart the server."
        ) from None
    except OSError as error:
        raise Refused(f"expected engine {engine.name} to answer, found {error}; {_ELSE}") from None
    result, refusal = answer.get("result"), answer.get("error")
    if isinstance(result, dict):
        return result
    if isinstance(refusal, str):
        raise Refused(refusal)
    raise Refused(f"expected a result or an error, found neither; {_ELSE}")


def _exchange(engine: Engine, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    folder = folders.open_one(engine.path.parent)
    try:
        connection = folders.connect(folder, engine.path.name)
    finally:
        os.close(folder)
    if connection is None:
        raise Refused(
            f"expected engine {engine.name} to run, found its socket without it; start the server "
            "again, or see by `kvoffload status` which others run."
        )
    with connection:
        wire.check_peer(connection)
        with suppress(BrokenPipeError):  # refused before it was read: the answer is there already
            wire.send(connection, message, wire.REQUEST_BYTES)
        try:
            return wire.receive(connection, wire.ANSWER_BYTES, seconds)
        except Refused as refusal:
            if isinstance(refusal, Silent):
                raise
            raise Refused(f"{str(refusal).rstrip('.')}; {_ELSE}") from None
