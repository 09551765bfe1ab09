"""The socket of one engine core, and the threads that take questions from it.

Each connection has a thread of its own, and there are few of them at a time. Neither clients that
say nothing nor commands that wait for the engine keep others out: of the former the one that has
been silent for longest goes when there are too many, of the latter one more is refused. Nothing
that comes in, or fails, reaches the engine: what is asked is answered, and a connection that is no
question is closed.

A process that is forked from an engine's has neither its threads nor anything to say for it, so it
keeps nothing of the socket, and takes nothing away.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from kvoffload_patch.control import folder as folders
from kvoffload_patch.control import wire
from kvoffload_patch.control.commands import STATUS, Command, read_command
from kvoffload_patch.control.errors import Refused

logger = logging.getLogger("vllm.kvoffload_patch")

# Connections at a time; of them, those that may be silent yet, and commands other than the status,
# which wait for the engine. What is left over is for questions that are answered at once.
AT_A_TIME, SILENT, COMMANDS, BACKLOG = 64, 16, 8, 64

# Until the next try where a connection could not be taken. It still waits, so without a pause this
# would spin for as long as descriptors, or threads, are short.
AGAIN_S = 1.0

Answer = Callable[[Command], Mapping[str, Any]]


class Listener:
    """Opens a socket and answers on it until it is closed.

    Args:
        answer: called on a thread of a connection; what it returns is sent as it is. It may raise
            Refused, and whatever else it raises is said in the answer.
        environ: where the folder is looked for; None: this process's.

    Raises:
        Refused: there is no folder for it.
        OSError: the socket cannot be made.
    """

    def __init__(self, answer: Answer, environ: Mapping[str, str] | None = None) -> None:
        self._answer = answer
        self._free = threading.BoundedSemaphore(AT_A_TIME)
        self._free_commands = threading.BoundedSemaphore(COMMANDS)
        self._silent: dict[socket.socket, None] = {}  # the one that came first is the first
        self._closing = threading.Lock()
        self._closed = False
        self._connections: set[socket.socket] = set()
        self.name = folders.new_name()
        self._folder = -1
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _open.add(self)  # first: another thread may fork at any time
        try:
            os.fchmod(self._socket.fileno(), 0o600)  # its file has this mode from the first
            with folders.making(environ, self._bind) as self._folder:
                self._listen()
        except BaseException:
            _open.discard(self)
            self._socket.close()
            raise
        try:
            threading.Thread(target=self._run, name="kvoffload-control", daemon=True).start()
        except BaseException:  # as where the system has no more threads: nobody would answer
            self.close()
            raise

    def _bind(self, folder: int) -> None:
        folders.remove_stale(folder)
        # Bound and not listening yet it looks stale to others, who do not have the lock.
        self._socket.bind(folders.address(folder, self.name))

    def _listen(self) -> None:
        try:
            self._socket.listen(BACKLOG)
        except BaseException:  # its file would stay until the next engine starts
            os.unlink(self.name, dir_fd=self._folder)
            raise

    def close(self) -> None:
        """Take the socket away; a question under way may still be answered."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            _open.discard(self)
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`
            self._socket.close()
            with suppress(OSError):
                os.unlink(self.name, dir_fd=self._folder)
            folders.leave(self._folder)

    def leave_to_parent(self) -> None:
        """In a forked process: close what it has inherited, which changes nothing for the other."""
        self._closed, self._closing = True, threading.Lock()  # it may be held by a thread not here
        for one in (self._socket, *self._connections):
            one.close()
        if self._folder >= 0:
            os.close(self._folder)

    def _run(self) -> None:
        told = False
        while not self._closed:
            self._free.acquire()
            try:
                self._take()
                told = False
            except Exception as error:  # noqa: BLE001 - the engine must not end, nor this
                self._free.release()
                if self._closed:
                    return
                if not told:
                    logger.warning(
                        "kvoffload_patch: a control connection was not taken (%s); the engine "
                        "serves on, and tries again.", error,
                    )  # fmt: skip
                told = True
                time.sleep(AGAIN_S)

    def _take(self) -> None:
        connection, _ = self._socket.accept()
        try:
            self._connections.add(connection)
            self._make_room()
            self._silent[connection] = None
            threading.Thread(
                target=self._serve, args=(connection,), name="kvoffload-asked", daemon=True
            ).start()
        except BaseException:  # as where the system has no more threads
            self._silent.pop(connection, None)
            self._connections.discard(connection)
            connection.close()
            raise

    def _make_room(self) -> None:
        """Of too many clients that have not asked yet, the first goes.

        What it has sent by now is read all the same, and answered if it is a whole question.
        """
        silent = list(self._silent)
        for oldest in silent[: max(0, len(silent) - SILENT + 1)]:
            self._silent.pop(oldest, None)
            with suppress(OSError):  # it is gone
                oldest.shutdown(socket.SHUT_RD)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError):
                self._send(connection, self._reply(connection))
        except Exception as error:  # noqa: BLE001 - the next question is answered
            logger.warning(
                "kvoffload_patch: a control message was not answered (%s); the engine serves on, "
                "ask again.", error,
            )  # fmt: skip
        finally:
            self._silent.pop(connection, None)
            self._connections.discard(connection)
            self._free.release()

    def _send(self, connection: socket.socket, answer: Mapping[str, Any]) -> None:
        try:
            wire.send(connection, answer, wire.ANSWER_BYTES)
        except Refused as refusal:  # it is too long
            text = f"{refusal}; see the server's log for the rest."
            wire.send(connection, {"error": text}, wire.ANSWER_BYTES)

    def _reply(self, connection: socket.socket) -> dict[str, Any]:
        try:
            wire.check_peer(connection)
            message = wire.receive(connection, wire.REQUEST_BYTES)
            self._silent.pop(connection, None)
            wanted = partial(wire.is_open, connection)
            return {"result": self._result(read_command(message)._replace(wanted=wanted))}
        except Refused as refusal:
            return {"error": str(refusal)}
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - said to the one that asked
            text = " ".join(str(error).split())[:500]
            return {"error": f"expected an answer, found {type(error).__name__}: {text}"}

    def _result(self, command: Command) -> Mapping[str, Any]:
        if command.name == STATUS:
            return self._answer(command)
        if not self._free_commands.acquire(blocking=False):
            raise Refused(
                f"expected fewer than {COMMANDS} commands under way, found as many; "
                "see by `kvoffload status` whether the engine takes steps, and ask again."
            )
        try:
            return self._answer(command)
        finally:
            self._free_commands.release()


_open = weakref.WeakSet[Listener]()


def _leave_to_parent() -> None:
    for listener in list(_open):
        listener.leave_to_parent()
    _open.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
