"""One direction's order of copies: its stream, and which tickets are done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch


class Lane:
    """Copies of one direction on a device, in the order of their tickets.

    Args:
        device: the CUDA device of the copies.
        priority: stream priority, as `torch.cuda.Stream` takes it.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.stream = torch.cuda.Stream(device=device, priority=priority)
        self._device = device
        self._under_way: deque[tuple[int, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._done = 0
        self._compute = torch.cuda.Event()

    def follow_compute(self) -> None:
        """Copies submitted from now on wait for what the current stream has been given."""
        self._compute.record(torch.cuda.current_stream(self._device))
        self.stream.wait_event(self._compute)

    def submit(self, ticket: int, copy: Callable[[], None]) -> None:
        """Enqueue a copy."""
        with torch.cuda.stream(self.stream):
            copy()
        event = self._spare.pop() if self._spare else torch.cuda.Event()
        event.record(self.stream)
        self._under_way.append((ticket, event))

    def hold(self, stream: torch.cuda.Stream | None, ticket: int) -> None:
        """Make a stream (the current one if None) wait for every copy up to ``ticket``."""
        if ticket <= self.poll():
            return
        waiter = torch.cuda.current_stream(self._device) if stream is None else stream
        event = None
        for number, candidate in self._under_way:
            if number > ticket:
                break
            event = candidate
        if event is not None:
            waiter.wait_event(event)

    def poll(self) -> int:
        """The last ticket done; never waits."""
        while self._under_way and self._under_way[0][1].query():
            self._retire()
        return self._done

    def drain(self) -> None:
        """Wait, on the host, for every copy submitted."""
        self.stream.synchronize()
        while self._under_way:
            self._retire()

    def _retire(self) -> None:
        self._done, event = self._under_way.popleft()
        self._spare.append(event)


class HostLane:
    """The same for the CPU device, where a copy is done when its call returns."""

    stream = None

    def __init__(self) -> None:
        self._done = 0

    def follow_compute(self) -> None:
        """Nothing computes beside the caller."""

    def submit(self, ticket: int, copy: Callable[[], None]) -> None:
        copy()
        self._done = ticket

    def hold(self, stream: object, ticket: int) -> None:
        """Nothing is ever under way."""

    def poll(self) -> int:
        return self._done

    def drain(self) -> None:
        """Nothing is ever under way."""
