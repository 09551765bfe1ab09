"""A copy that never ends, in an engine on the CPU.

The CPU device copies at once and has no streams, so nothing of it can hang but the step itself.
Here it is a device with streams, on which whatever is enqueued is done at once, and all that comes
behind one copy never is. TEST_HANG is ``LINK NUMBER WHERE``: ``load 1 device`` is the first load,
its streams never come to its end, and neither does a forward pass that waits for them. With
``output`` it is not the forward pass that blocks the host then, but what waits for its output, as
with asynchronous scheduling. With ``driver`` the call that enqueues the copy never returns.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from kvoffload_patch.links import LOAD, STORE
from kvoffload_patch.transfer import deadline
from kvoffload_patch.transfer import device as devices
from kvoffload_patch.transfer import engine as copy_engine
from kvoffload_patch.transfer.devices.host import HostDevice
from kvoffload_patch.transfer.devices.torch import Unregistered

# Instead of a minute and half of one.
DEADLINE_S, GRACE_S, PERIOD_S = 2.0, 2.0, 0.1


class Stream:
    """Where what is enqueued is done at once, until it hangs."""

    hangs = False

    def wait_event(self, event: Event) -> None:
        self.hangs = self.hangs or not event.query()

    def wait_stream(self, other: Stream) -> None:
        self.hangs = self.hangs or other.hangs

    def query(self) -> bool:
        return not self.hangs

    def synchronize(self) -> None:
        _block_if(self.hangs)


class Event:
    """A place on a stream."""

    _never = False

    def record(self, stream: Stream) -> None:
        self._never = stream.hangs

    def query(self) -> bool:
        return not self._never

    def synchronize(self) -> None:
        _block_if(self._never)

    def elapsed_time(self, end: Event) -> float:
        return 0.0


class Device(HostDevice):
    """The CPU, with streams; each thread computes on one of them, which they share."""

    is_host, registers = False, True

    def __init__(self) -> None:
        self.compute = Stream()
        self._within = threading.local()

    def new_stream(self, priority: int = 0) -> Stream:  # type: ignore[override]
        return Stream()

    def new_event(self, timed: bool = False) -> Event:  # type: ignore[override]
        return Event()

    def current_stream(self) -> Stream:  # type: ignore[override]
        return getattr(self._within, "stream", self.compute)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return self._on(stream) if stream is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._within.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._within.stream = before

    def registrar(self) -> Unregistered:  # type: ignore[override]
        return Unregistered()

    def pci_id(self) -> str:  # type: ignore[override]
        raise ValueError("it is on no bus")


def install() -> None:
    """Have the engines that are started from now on hang, as the environment says."""
    link, number, where = os.environ["TEST_HANG"].split()
    deadline.DEADLINE_S, deadline.GRACE_S = DEADLINE_S, GRACE_S
    deadline.DEADLINE_PERIOD_S = PERIOD_S
    device = Device()
    devices._KINDS["cpu"] = lambda _: device
    _hang(LOAD if link == "load" else STORE, int(number), where == "driver")
    if where == "output":
        _block_outputs(device)
    else:
        _block_forward_passes(device)
    if "TEST_UNIPROC" in os.environ:
        _run_ranks_in_the_engine_core()


def _hang(link: Any, number: int, in_driver: bool) -> None:
    """Of the copies of an engine, those that try a backend are none."""
    as_made: Callable[..., Any] = copy_engine.copies_of

    def copies_of(backend: Any) -> dict[Any, Any]:
        made, calls = as_made(backend), [0]
        copy = made[link]

        def maybe_hang(source_ids: Any, target_ids: Any, streams: Any, compared: bool) -> Any:
            calls[0] += 1
            if calls[0] != number:
                return copy(source_ids, target_ids, streams, compared)
            return _hang_in_driver() if in_driver else _hang_on(streams)

        return {**made, link: maybe_hang}

    copy_engine.copies_of = copies_of


def _hang_on(streams: Any) -> Iterator[int]:
    streams.blocks.hangs = streams.bus.hangs = True
    yield 0


def _hang_in_driver() -> Iterator[int]:
    yield 0
    _block()


def _block_forward_passes(device: Device) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    as_made = GPUModelRunner._model_forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        device.compute.synchronize()
        return as_made(self, *args, **kwargs)

    GPUModelRunner._model_forward = forward


def _block_outputs(device: Device) -> None:
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

    as_made = AsyncGPUModelRunnerOutput.get_output

    def get_output(self: Any) -> Any:
        device.compute.synchronize()
        return as_made(self)

    AsyncGPUModelRunnerOutput.get_output = get_output


def _run_ranks_in_the_engine_core() -> None:
    """As on a GPU, where an engine of one rank has no worker process."""
    from vllm.platforms.cpu import CpuPlatform

    as_made = CpuPlatform.check_and_update_config.__func__

    def check(cls: type, vllm_config: Any) -> None:
        as_made(cls, vllm_config)
        vllm_config.parallel_config.distributed_executor_backend = "uni"

    CpuPlatform.check_and_update_config = classmethod(check)


def _block_if(hangs: bool) -> None:
    if hangs:
        _block()


def _block() -> NoReturn:
    threading.Event().wait()
    raise AssertionError("nobody sets it")
