"""An interrupt, as Ctrl-C is, anywhere within `CopyQueue`: what comes after it loses no copy."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from transfer.fake_cuda import FakeCuda

from kvoffload_patch.transfer import queue as copy_queue
from kvoffload_patch.transfer.queue import CopyQueue


def interrupted(at: int, call: Callable[[], object]) -> bool:
    """Call it, and interrupt it at the at-th place in the queue's module where Python looks for
    signals: as a function begins, and after a call of one in C. Whether it has so many.
    """
    left = at

    def look(frame: Any, event: str, _: object) -> None:
        nonlocal left
        if frame.f_code.co_filename == copy_queue.__file__ and event in ("call", "c_return"):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return left <= 0


def places(play: Callable[[int], bool]) -> int:
    """Play with an interrupt at each place; how many there are."""
    at = 1
    while play(at):
        at += 1
    return at - 1


def assert_later_ones_go_behind_compute(cuda: FakeCuda, queue: CopyQueue) -> None:
    """Each has events of its own: with one of another's it would read what is not computed yet."""
    log: list[tuple[int, str]] = []

    def start(ticket: int, streams: Any) -> Iterator[int]:
        streams.blocks.append(partial(log.append, (ticket, "copied")))
        yield 0

    tickets = range(2, 5)  # so many that the second takes an event that the first one's end takes
    for ticket in tickets:
        cuda.current.append(partial(log.append, (ticket, "computed")))
        queue.submit(ticket, partial(start, ticket), ())
    queue.flush(max(tickets))
    while cuda.run_one(cuda.streams.index(queue.streams.blocks)):
        pass  # copies go on whenever they can
    assert [one for one, what in log if what == "copied"] == [*tickets]
    assert all(log.index((one, "computed")) < log.index((one, "copied")) for one in tickets)


@pytest.mark.parametrize("refused", [False, True])
def test_a_copy_is_waited_for_and_not_taken_for_right_wherever_it_is_interrupted(
    refused: bool,
) -> None:
    """It brings other bytes than were stored, or the driver refuses its second half."""

    def play(at: int) -> bool:
        with FakeCuda(at) as cuda:
            queue, log, lost = CopyQueue(cuda, threading.RLock(), False, 2), [], []

            def start(streams: Any) -> Iterator[int]:
                for half in range(2):
                    streams.bus.append(partial(log.append, half))
                    if refused and half:
                        raise OSError("refused")
                    streams.blocks.wait_stream(streams.bus)
                    streams.blocks.append(partial(log.append, half))
                    if not half:
                        yield 0
                return lambda: "it has other bytes"

            queue.submit(1, start, (), lambda: lost.append(1))
            found = interrupted(at, queue.drain)
            queue.drain()
            enqueued = len(log)
            cuda.run()
            assert len(log) == enqueued, "the device was at work on what nobody waits for"
            assert (queue.poll(), list(queue.failed)) == (1, [1]), f"place {at}"
            assert bool(lost) or not refused
            assert_later_ones_go_behind_compute(cuda, queue)
            return found

    assert places(play) > 20
