"""CUDA events: which call of the driver each method makes, over a library that notes its calls."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from transfer.layouts import needs_gpu

from kvoffload_patch.transfer.device import device_of
from kvoffload_patch.transfer.devices.cuda_events import CudaEvent, EventCalls
from kvoffload_patch.transfer.errors import TransferError

NOT_READY, LAUNCH_FAILED = 600, 719


class Library:
    """The driver: events are 11, 12, ..., and each call returns what `answers` has, or 0.

    Attributes:
        calls: names and numbers, pointers left out.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, int] = {}
        self._events = 10

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append((name, *(a for a in args if isinstance(a, int))))
            if name == "cuEventCreate":
                self._events += 1
                args[0]._obj.value = self._events
            if name == "cuEventElapsedTime":
                args[0]._obj.value = 2.5
            return self.answers.get(name, 0)

        setattr(self, name, call)
        return call


class Stream:
    """As torch's: a handle, and how it waits."""

    cuda_stream = 7

    def wait_event(self, event: CudaEvent) -> None:
        event.wait(self)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    return library


@pytest.mark.parametrize(("timed", "flags"), [(False, 2), (True, 0)])
def test_an_event_is_made_when_it_is_first_recorded_and_destroyed_once(
    timed: bool, flags: int, driver: Library
) -> None:
    event = CudaEvent(EventCalls(), timed)
    event.record(Stream())
    event.record(Stream())
    Stream().wait_event(event)
    event.synchronize()
    del event
    assert driver.calls == [
        ("cuEventCreate", flags),
        ("cuEventRecord", 11, 7),
        ("cuEventRecord", 11, 7),
        ("cuStreamWaitEvent", 7, 11, 0),
        ("cuEventSynchronize", 11),
        ("cuEventDestroy_v2", 11),
    ]


def test_one_that_was_never_recorded_has_come_and_holds_nobody_up(driver: Library) -> None:
    event = CudaEvent(EventCalls(), False)
    Stream().wait_event(event)
    event.synchronize()
    assert event.query() is True
    del event
    assert driver.calls == []


def test_what_is_not_over_is_told_from_what_has_failed(driver: Library) -> None:
    device: Any = device_of(torch.device("cuda", 0))
    event = device.new_event()
    event.record(Stream())
    assert event.query() and device.is_over(Stream())
    driver.answers = {"cuEventQuery": NOT_READY, "cuStreamQuery": NOT_READY}
    assert not event.query() and not device.is_over(Stream())
    driver.answers = {"cuEventQuery": LAUNCH_FAILED, "cuStreamQuery": LAUNCH_FAILED}
    with pytest.raises(TransferError, match="to carry out cuEventQuery, found error 719"):
        event.query()
    with pytest.raises(TransferError, match="to carry out cuStreamQuery, found error 719"):
        device.is_over(Stream())


def test_timed_ones_have_the_milliseconds_between_them(driver: Library) -> None:
    device: Any = device_of(torch.device("cuda", 0))
    first, last = device.new_event(timed=True), device.new_event(timed=True)
    first.record(Stream())
    last.record(Stream())
    assert first.elapsed_time(last) == 2.5
    assert driver.calls[-1] == ("cuEventElapsedTime", 11, 12)


def test_a_machine_without_the_driver_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: not there")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(TransferError, match="libcuda.so.1, found libcuda.so.1: not there"):
        device_of(torch.device("cuda", 0)).new_event()


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_it_orders_streams_of_torch() -> None:
    device: Any = device_of(torch.device("cuda", 0))
    first, second = device.new_stream(), device.new_stream()
    value = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    began, over = device.new_event(timed=True), device.new_event(timed=True)
    with device.on(first):
        began.record(first)
        torch.cuda._sleep(50_000_000)
        value.add_(1)
        over.record(first)
    assert not over.query() and not device.is_over(first)
    second.wait_event(over)
    with device.on(second):
        value.mul_(3)
    second.synchronize()
    assert value.item() == 3 and over.query() and device.is_over(first)
    assert began.elapsed_time(over) > 1
