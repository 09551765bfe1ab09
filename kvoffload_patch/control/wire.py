"""One message: a line of JSON, bounded in bytes and in time, from a process of the same user."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvoffload_patch.control.errors import Refused, Silent

REQUEST_BYTES, ANSWER_BYTES = 4_096, 65_536
MESSAGE_S = 2.0  # from the first byte that is waited for to the last

_CREDENTIALS = struct.Struct("3i")  # process, user, group


def check_peer(connection: socket.socket) -> None:
    """Raises Refused unless the process at the other end is of this process's user."""
    size = _CREDENTIALS.size
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = _CREDENTIALS.unpack(found)
    if user != os.geteuid():
        raise Refused(f"expected a process of user {os.geteuid()}, found one of user {user}")


def send(connection: socket.socket, message: Mapping[str, Any], limit: int) -> None:
    """Send one message.

    Raises:
        Refused: it is longer than ``limit`` bytes.
        OSError: the other end does not take it in time, or is gone.
    """
    data = json.dumps(message).encode() + b"\n"
    if len(data) > limit:
        raise Refused(f"expected a message of {limit} bytes at most, found {len(data)}")
    connection.settimeout(MESSAGE_S)
    connection.sendall(data)


def receive(connection: socket.socket, limit: int, seconds: float | None = None) -> dict[str, Any]:
    """The message of the other end, within ``seconds`` (None: `MESSAGE_S`).

    Raises:
        Silent: it does not come in time.
        Refused: it is no message, or too long.
        OSError: the other end is gone.
    """
    seconds = MESSAGE_S if seconds is None else seconds
    until = time.monotonic() + seconds
    data = b""
    while not data.endswith(b"\n"):
        left = until - time.monotonic()
        try:
            connection.settimeout(max(left, 0.001))
            more = connection.recv(limit + 1 - len(data)) if left > 0 else None
        except socket.timeout:  # not yet TimeoutError in Python 3.9
            more = None
        if more is None:
            raise Silent(f"expected a whole message within {seconds:g} s, found {len(data)} bytes")
        data += more
        if len(data) > limit:
            raise Refused(f"expected a message of {limit} bytes at most, found more")
        if not more:
            raise Refused("expected a message that ends with a new line, found its end before that")
    return parse(data)


def is_open(connection: socket.socket) -> bool:
    """Whether the other end can still read; one that only has nothing more to say can."""
    looked = select.poll()
    try:
        looked.register(connection, 0)  # a hang-up is told of unasked
    except ValueError:  # this end is closed
        return False
    return not looked.poll(0)


def parse(data: bytes) -> dict[str, Any]:
    """One JSON object, no name of which comes twice; Refused if it is anything else."""
    try:
        found = json.loads(data, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(f"expected a line of JSON, found {type(error).__name__}") from None
    if not isinstance(found, dict):
        raise Refused(f"expected a JSON object, found a {type(found).__name__}")
    return found


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(name)
