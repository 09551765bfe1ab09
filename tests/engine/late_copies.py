"""Copies that happen as late as the plans allow, on the CPU device, or late on a GPU.

The CPU device copies at once, which would hide a missing wait: every order is right if nothing is
ever under way. These queues keep a copy back until a plan makes a step wait for it, or until
it has been polled a number of times. A wait that is missing shows as a wrong token. On a GPU copies
run beside the forward pass in any case; there each is held up on its own stream for some
milliseconds, so that nothing is in place by chance.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from kvoffload_patch.transfer import engine as copy_engine
from kvoffload_patch.transfer.queue import CopyQueue

_SyncCopyQueue = copy_engine.SyncCopyQueue


class LateQueue(_SyncCopyQueue):
    """Stands in for `SyncCopyQueue`, which makes the copies here when their time has come."""

    patience = 3

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[list[Any]] = deque()  # [arguments of `submit`, polls seen]

    @property
    def queued(self) -> bool:
        return bool(self._waiting)

    def submit(self, *args: Any) -> None:
        self._waiting.append([args, 0])

    def flush(self, ticket: int) -> None:
        while self._waiting and self._waiting[0][0][0] <= ticket:
            self._carry_out()

    def advance(self) -> bool:
        if self._waiting:
            self._carry_out()
            return True
        return False

    def hold(self, stream: object, ticket: int) -> None:
        self.flush(ticket)

    def poll(self) -> int:
        for entry in self._waiting:
            entry[1] += 1
        while self._waiting and self._waiting[0][1] > self.patience:
            self._carry_out()
        return super().poll()

    def drain(self, check: object = None) -> None:
        while self._waiting:
            self._carry_out()

    def _carry_out(self) -> None:
        (ticket, start, behind, *more), _ = self._waiting.popleft()
        for other, other_ticket in behind:
            other.flush(other_ticket)
        super().submit(ticket, start, behind, *more)


class StreamQueue(LateQueue):
    """Copies that a forward pass waits for are made when it begins, as on a device's stream.

    What the host does before that, it does before the copy. A copy begins behind what the stream
    waited for when it was submitted: a load behind the stores of the blocks that it overwrites.
    """

    patience = 200
    made: ClassVar[list[StreamQueue]] = []

    def __init__(self) -> None:
        super().__init__()
        self._due = 0
        self._behind: dict[int, list[tuple[StreamQueue, int]]] = {}
        self.made.append(self)

    def submit(self, ticket: int, *args: Any) -> None:
        self._behind[ticket] = [(queue, queue._due) for queue in self.made]
        super().submit(ticket, *args)

    def _carry_out(self) -> None:
        for queue, due in self._behind.pop(self._waiting[0][0][0], ()):
            if queue is not self:
                queue.flush(due)
        super()._carry_out()

    def hold(self, stream: object, ticket: int) -> None:
        self._due = max(self._due, ticket)

    def forward_begins(self) -> None:
        """The stream has come to the forward pass."""
        self.flush(self._due)


_HELD_UP_CYCLES = 5_000_000  # of a GPU's clock, about 3 ms on an H100
_held_up: list[int] = []  # tickets


class HeldUpQueue(CopyQueue):
    """Copies of a GPU that are held up on its streams, and again after each group of rows."""

    def _begin(self, job: Any) -> Any:
        slices = super()._begin(job)  # it waits for the steps before; nothing is copied yet
        self._hold_up_blocks()
        self.streams.bus.wait_stream(self.streams.blocks)
        _held_up.append(job.ticket)
        return slices

    def _mark(self, job: Any, arrived: int) -> None:
        more = arrived > len(job.arrived)
        super()._mark(job, arrived)
        if more:
            self._hold_up_blocks()

    def _hold_up_blocks(self) -> None:
        import torch

        with torch.cuda.stream(self.streams.blocks):
            torch.cuda._sleep(_HELD_UP_CYCLES)


def install(patience: int | str) -> None:
    """Make every `CopyEngine` built from now on a late one.

    Args:
        patience: polls after which a copy is made by itself; ``"stream"``: see `StreamQueue`;
            ``"device"``: copies of a GPU are held up on its streams, and again after each group of
            rows.
    """
    if patience == "device":
        copy_engine.CopyQueue = HeldUpQueue  # type: ignore[misc]
        return
    if patience == "stream":
        _tell_of_forward_passes()
        copy_engine.SyncCopyQueue = StreamQueue
        return
    LateQueue.patience = int(patience)
    copy_engine.SyncCopyQueue = LateQueue


def held_up() -> int:
    """Copies of a GPU that were held up so far."""
    return len(_held_up)


def _tell_of_forward_passes() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    as_made = GPUModelRunner._model_forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        _forward_begins()
        return as_made(self, *args, **kwargs)

    GPUModelRunner._model_forward = forward
    with contextlib.suppress(ImportError):  # releases without runner V2
        _tell_of_forward_passes_of_v2()


def _tell_of_forward_passes_of_v2() -> None:
    """Runner V2 tells its connector, or what stands for none, right before each of them."""
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector, KVConnector

    def told(as_made: Callable[..., None]) -> Callable[..., None]:
        def pre_forward(*args: Any, **kwargs: Any) -> None:
            as_made(*args, **kwargs)
            _forward_begins()

        return pre_forward

    for connector in (KVConnector, ActiveKVConnector):
        connector.pre_forward = told(connector.__dict__["pre_forward"])


def _forward_begins() -> None:
    for queue in StreamQueue.made:
        queue.forward_begins()
