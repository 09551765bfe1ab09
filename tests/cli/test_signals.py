"""What ends a command lets it clear up first, and only while it asks for that."""

from __future__ import annotations

import signal

import pytest

from kvoffload_patch.cli.signals import ended_in_order


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_an_exit_while_there_is_something_to_clear_up(number: int) -> None:
    caught, cleared = list[int](), list[int]()
    before = signal.signal(number, lambda *_: caught.append(number))  # what would end the tests
    try:
        with pytest.raises(SystemExit) as ended, ended_in_order():
            try:
                signal.raise_signal(number)
            finally:
                cleared.append(number)
        assert ended.value.code == 128 + number and cleared == [number] and not caught
        signal.raise_signal(number)
        assert caught == [number]
    finally:
        signal.signal(number, before)
