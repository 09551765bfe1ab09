"""`LoadTimes`: what is averaged, and what is not, on a device whose clock is set by hand."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvoffload_patch.transfer.backends.load_times import LoadTimes
from kvoffload_patch.transfer.tuning import LOAD_TIMES_BYTES

MIB = 1 << 20


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.at = 0.0

    def record(self, stream: str) -> None:
        assert stream == "bus"
        self.at = self._device.at

    def query(self) -> bool:
        return self._device.now >= self.at

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query(), "torch raises for an event that has not come"
        return end.at - self.at


class Device:
    """Slices end at ``at``, which they put off; ``now`` is how far the device is, in ms."""

    def __init__(self) -> None:
        self.at = self.now = 0.0
        self.events = 0

    def new_event(self, timed: bool = False) -> Event:
        assert timed
        self.events += 1
        return Event(self)


def load(times: LoadTimes, device: Device, *slices: tuple[float, int], end: bool = True) -> None:
    """Slices that take so many milliseconds, with their bytes."""
    times.begin()
    for ms, nbytes in slices:
        device.at += ms
        times.crossed(nbytes, "bus")
    if end:
        times.end("bus")


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def times(device: Device) -> LoadTimes:
    return LoadTimes(cast(Any, device), buffers=2)


def test_slices_that_may_wait_for_the_step_before_do_not_count(
    device: Device, times: LoadTimes
) -> None:
    load(times, device, (1, MIB), (1, MIB), (200, MIB), (3, MIB), (5, 3 * MIB))
    device.now = device.at
    assert times.ms_per_byte() == pytest.approx(8 / (4 * MIB))


def test_a_load_of_few_slices_says_nothing(device: Device, times: LoadTimes) -> None:
    load(times, device, (1, MIB), (1, MIB), (200, MIB))
    device.now = device.at
    assert times.ms_per_byte() == 0


def test_what_is_under_way_is_not_waited_for(device: Device, times: LoadTimes) -> None:
    load(times, device, *[(1.0, MIB)] * 5)
    device.now = device.at - 0.5
    assert times.ms_per_byte() == 0
    device.now = device.at
    assert times.ms_per_byte() == pytest.approx(1 / MIB)


def test_a_load_that_was_given_up_does_not_count(device: Device, times: LoadTimes) -> None:
    load(times, device, *[(50.0, MIB)] * 5, end=False)
    load(times, device, *[(1.0, MIB)] * 5)
    device.now = device.at
    assert times.ms_per_byte() == pytest.approx(1 / MIB)


def test_the_average_comes_half_way_with_as_many_bytes_as_it_has_memory_for(
    device: Device, times: LoadTimes
) -> None:
    load(times, device, *[(1.0, MIB)] * 5)
    load(times, device, *[(0.0, 0)] * 3, (3.0 * LOAD_TIMES_BYTES / MIB, LOAD_TIMES_BYTES))
    device.now = device.at
    assert times.ms_per_byte() == pytest.approx(2 / MIB)


def test_what_was_loaded_before_the_tier_serves_does_not_count(
    device: Device, times: LoadTimes
) -> None:
    """One late load afterwards is not all there is either."""
    load(times, device, *[(900.0, MIB)] * 5)
    times.start_from(1 / MIB)
    device.now = device.at
    assert times.ms_per_byte() == 1 / MIB
    load(times, device, *[(900.0, MIB)] * 4)
    device.now = device.at
    assert times.ms_per_byte() == pytest.approx(1 / MIB, rel=1)


@pytest.mark.parametrize(("slices", "end"), [(5, True), (3, True), (5, False)])
def test_events_are_used_again(device: Device, times: LoadTimes, slices: int, end: bool) -> None:
    for _ in range(20):
        load(times, device, *[(1.0, MIB)] * slices, end=end)
        device.now = device.at
        times.ms_per_byte()
    assert device.events <= 2
