"""What a warm process does: it forks when it is asked to, see `warm`."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
from contextlib import suppress
from typing import Any

READY = b"ready\n"
Asked = dict[str, Any]


class Forking:
    """Forks for each line ``{"spec", "env", "log"}`` of each connection.

    A connection is told that this process is ready, then the child's pid, then its status. A child
    whose connection is closed before is killed, with its group.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._waiting = listener, selectors.DefaultSelector()
        self._connections: set[socket.socket] = set()
        self._children: dict[socket.socket, int] = {}
        self._waiting.register(listener, selectors.EVENT_READ)

    def serve(self) -> Asked | None:
        """In a child, returns what it was asked for; here, None once all connections are closed."""
        while True:
            for key, _ in self._waiting.select():
                source: Any = key.fileobj
                if source is self._listener:
                    self._accept()
                elif source not in self._connections:
                    self._note_end(source, *key.data)
                elif line := _line_of(source):
                    asked = self._fork(source, line)
                    if asked is not None:
                        return asked
                else:
                    self._forget(source)
                    if not self._connections:
                        self._listener.close()  # a later one starts another process
                        return None

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.sendall(READY)
        self._connections.add(connection)
        self._waiting.register(connection, selectors.EVENT_READ)

    def _fork(self, asking: socket.socket, line: bytes) -> Asked | None:
        pid = os.fork()
        if not pid:
            self._waiting.close()
            for inherited in (self._listener, *self._connections):
                inherited.close()
            asked: Asked = json.loads(line)
            return asked
        self._children[asking] = pid
        _tell(asking, pid)
        self._waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, asking))
        return None

    def _note_end(self, child: int, pid: int, asking: socket.socket) -> None:
        self._children.pop(asking, None)
        _tell(asking, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        self._waiting.unregister(child)
        os.close(child)

    def _forget(self, connection: socket.socket) -> None:
        if connection in self._children:
            with suppress(ProcessLookupError):
                os.killpg(self._children.pop(connection), signal.SIGKILL)
        self._waiting.unregister(connection)
        self._connections.discard(connection)
        connection.close()


def _line_of(connection: socket.socket) -> bytes:
    """The next line; empty if there is none any more."""
    line = b""
    with suppress(OSError):
        while not line.endswith(b"\n"):
            read = connection.recv(1 << 16)
            if not read:
                return b""
            line += read
    return line


def _tell(connection: socket.socket, number: int) -> None:
    with suppress(OSError):  # it was closed: nobody waits for it
        connection.sendall(b"%d\n" % number)
