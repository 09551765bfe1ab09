"""The socket of one engine core, and the threads that take questions from it.

Each connection has a thread of its own, for as long as a message may take, and there are few of
them at a time: one that says nothing keeps no other waiting. Nothing that comes in, or fails,
reaches the engine: what is asked is answered, and a connection that is no question is closed.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from kvoffload_patch.control import folder as folders
from kvoffload_patch.control import wire
from kvoffload_patch.control.commands import Command, read_command
from kvoffload_patch.control.errors import Refused

logger = logging.getLogger("vllm.kvoffload_patch")

AT_A_TIME, BACKLOG = 8, 64

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
        self._closing = threading.Lock()
        self._closed = False
        self.name = folders.new_name()
        with folders.making(environ) as self._folder:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                folders.remove_stale(self._folder)
                # Bound and not listening yet it looks stale to others, who do not have the lock.
                self._socket.bind(folders.address(self._folder, self.name))
                os.chmod(self.name, 0o600, dir_fd=self._folder)
                self._socket.listen(BACKLOG)
            except BaseException:
                self._socket.close()
                raise
        threading.Thread(target=self._run, name="kvoffload-control", daemon=True).start()

    def close(self) -> None:
        """Take the socket away; a question under way may still be answered."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`
            self._socket.close()
            with suppress(OSError):
                os.unlink(self.name, dir_fd=self._folder)
            folders.leave(self._folder)

    def _run(self) -> None:
        while not self._closed:
            self._free.acquire()
            try:
                connection, _ = self._socket.accept()
                threading.Thread(
                    target=self._serve, args=(connection,), name="kvoffload-asked", daemon=True
                ).start()
            except Exception as error:  # noqa: BLE001 - the engine must not end, nor this spin
                self._free.release()
                if not self._closed:
                    logger.warning("kvoffload_patch: the control socket is closed: %s", error)
                    self.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError):
                wire.send(connection, self._reply(connection), wire.ANSWER_BYTES)
        except Exception as error:  # noqa: BLE001 - the next question is answered
            logger.warning("kvoffload_patch: a control message was not answered: %s", error)
        finally:
            self._free.release()

    def _reply(self, connection: socket.socket) -> dict[str, Any]:
        try:
            wire.check_peer(connection)
            message = wire.receive(connection, wire.REQUEST_BYTES)
            return {"result": self._answer(read_command(message))}
        except Refused as refusal:
            return {"error": str(refusal)}
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - said to the one that asked
            text = " ".join(str(error).split())[:500]
            return {"error": f"expected an answer, found {type(error).__name__}: {text}"}
