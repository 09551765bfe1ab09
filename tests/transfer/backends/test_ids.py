"""Numbers arrive as they were given, however many are under way."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from transfer.layouts import needs_gpu

from kvoffload_patch.transfer.backends.ids import IdUploader


class LateEvent:
    """Done when it is waited for, or when told."""

    def __init__(self) -> None:
        self.done = False
        self.waited = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waited = self.done = True


@pytest.mark.parametrize("seed", range(20))
def test_no_place_is_given_while_it_is_read(seed: int) -> None:
    rng = random.Random(seed)
    uploader = IdUploader(torch.device("cpu"), capacity=64)
    in_use: deque[tuple[range, LateEvent]] = deque()
    for _ in range(500):
        count = rng.randint(1, 32)
        begin = uploader._place(count)
        place = range(begin, begin + count)
        assert begin >= 0 and begin + count <= 64
        for other, event in in_use:
            assert event.done or place.stop <= other.start or other.stop <= place.start
        event = LateEvent()
        uploader._used.append((place.start, place.stop, event))
        in_use.append((place, event))
        while in_use and rng.random() < 0.4:  # the device ends them in order
            in_use.popleft()[1].done = True


def test_nobody_waits_while_there_is_room() -> None:
    uploader = IdUploader(torch.device("cpu"), capacity=64)
    events = []
    for _ in range(4):
        begin = uploader._place(16)
        events.append(LateEvent())
        uploader._used.append((begin, begin + 16, events[-1]))
    assert not any(event.waited for event in events)
    uploader._place(10)
    assert [event.waited for event in events] == [True, False, False, False]


def test_on_the_cpu_they_are_there_already() -> None:
    numbers = np.array([3, 1, 2])
    assert IdUploader(torch.device("cpu")).upload(numbers, None).tolist() == [3, 1, 2]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("capacity", [64, 1 << 16])
def test_numbers_arrive_on_streams_that_lag(capacity: int) -> None:
    rng = np.random.default_rng(0)
    device = torch.device("cuda")
    uploader = IdUploader(device, capacity)
    streams = [torch.cuda.Stream() for _ in range(2)]
    given: list[Any] = []
    for i in range(60):
        stream = streams[i % 2]
        if i % 7 == 0:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
        numbers = rng.integers(0, 1 << 40, size=int(rng.choice([1, 3, 31, 32, 33, 500, 3000])))
        given.append((numbers, uploader.upload(numbers, stream)))
    torch.cuda.synchronize()
    for numbers, uploaded in given:
        assert np.array_equal(uploaded.cpu().numpy(), numbers)
