"""A message is bounded in bytes and in time, parsed strictly, and from the same user."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_patch.control import wire
from kvoffload_patch.control.errors import Refused


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    yield here, there
    here.close()
    there.close()


def test_a_message_arrives_as_it_was_sent_in_however_many_pieces(ends: Any) -> None:
    here, there = ends
    message = {"command": "set", "eviction": "lru\n\u00e9"}
    wire.send(here, message, 200)
    assert wire.receive(there, 200) == message
    for byte in b'{"a": "b"}\n':
        here.sendall(bytes([byte]))
    assert wire.receive(there, 200) == {"a": "b"}


def test_what_is_too_long_is_neither_sent_nor_read(ends: Any) -> None:
    here, there = ends
    with pytest.raises(Refused, match="100 bytes at most"):
        wire.send(here, {"a": "b" * 100}, 100)
    here.sendall(b"x" * 5000)
    with pytest.raises(Refused, match="4096 bytes at most"):
        wire.receive(there, wire.REQUEST_BYTES)


def test_one_who_says_nothing_or_too_little_in_time_is_not_waited_for(ends: Any) -> None:
    here, there = ends
    here.sendall(b'{"a"')
    began = time.monotonic()
    with pytest.raises(Refused, match="found 4 bytes"):
        wire.receive(there, 100, 0.05)
    assert time.monotonic() - began < 60
    here.shutdown(socket.SHUT_WR)
    with pytest.raises(Refused, match="found its end"):
        wire.receive(there, 100)


def test_who_has_only_said_everything_still_reads_and_who_has_gone_does_not(ends: Any) -> None:
    here, there = ends
    wire.send(here, {"command": "pause"}, 100)
    assert wire.is_open(there)
    here.shutdown(socket.SHUT_WR)  # as `nc -N` does
    assert wire.receive(there, 100) and wire.is_open(there)
    here.close()
    assert not wire.is_open(there)
    there.close()
    assert not wire.is_open(there)


@pytest.mark.parametrize(
    "data",
    [b"\n", b"[]\n", b'"a"\n', b"1\n", b"{\n", b'{"a": NaN}\n', b'{"a": 1, "a": 2}\n', b"\xff\n",
     b"[" * 4000 + b"\n", b'{"a": ' * 600 + b"\n", b'{"a": 1}x\n', b"9" * 4090 + b"\n"],
)  # fmt: skip
def test_what_is_no_object_of_json_is_refused(data: bytes) -> None:
    with pytest.raises(Refused, match="expected a"):
        wire.parse(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_refused(data: bytes) -> None:
    with suppress(Refused):
        assert isinstance(wire.parse(data), dict)


def test_a_process_of_another_user_is_refused(ends: Any) -> None:
    class Other:
        def getsockopt(self, *_: Any) -> bytes:
            return struct.pack("3i", 1, os.geteuid() + 1, 0)

    wire.check_peer(ends[0])
    with pytest.raises(Refused, match=f"found one of user {os.geteuid() + 1}"):
        wire.check_peer(Other())  # type: ignore[arg-type]
