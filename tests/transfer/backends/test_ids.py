"""Numbers arrive as they were given, however many are under way, and take no more memory."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from transfer.allocations import NoAllocations, taken_on_the_gpu
from transfer.fake_cuda import FakeCuda, FakeStream
from transfer.layouts import needs_gpu

from kvoffload_patch.transfer.backends import staged as copy_staged
from kvoffload_patch.transfer.backends.ids import IdUploader
from kvoffload_patch.transfer.backends.tiles import id_copier

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")


def late_uploader(cuda: FakeCuda, under_way: int, batch: int) -> IdUploader:
    """Its copies are made when their stream's turn comes; `cuda` is entered."""
    return IdUploader(CPU, under_way, batch, copy_staged.id_copier(CPU))


@interpreted
@pytest.mark.parametrize(("under_way", "batch"), [(0, 1), (1, 7), (40, 7), (7, 40), (500, 20)])
@pytest.mark.parametrize("seed", range(6))
def test_numbers_arrive_on_streams_that_lag(seed: int, under_way: int, batch: int) -> None:
    """What reads them goes on the same stream, as in a backend."""
    rng = random.Random(seed)
    with FakeCuda(seed) as cuda:
        uploader = late_uploader(cuda, under_way, batch)
        refused = NoAllocations(cuda)
        streams = [cuda.new_stream() for _ in range(2)]
        seen: list[list[int]] = []
        given: list[list[int]] = []
        stream = streams[0]
        for _ in range(60):
            if rng.random() < 0.1:
                stream = rng.choice(streams)
            numbers = [rng.randrange(1 << 40) for _ in range(rng.randint(1, batch))]
            given.append(numbers)
            ids = refused.guard(uploader.upload)(np.array(numbers, dtype=np.int64), stream)
            assert ids.shape == (batch,)

            def read(ids: torch.Tensor = ids, count: int = len(numbers)) -> None:
                seen.append(ids[:count].tolist())

            stream.append(read)
            for _ in range(rng.choice([0, 0, 3])):
                cuda.run_one()
        cuda.run()
    assert seen == given


@interpreted
def test_nobody_waits_while_there_is_room() -> None:
    with FakeCuda() as cuda:
        uploader, stream = late_uploader(cuda, under_way=32, batch=16), FakeStream(cuda)
        cuda.streams.append(stream)
        for _ in range(4):  # as many as the ring has: 32 and two batches
            uploader.upload(np.arange(16), stream)
        assert stream.done == 0
        uploader.upload(np.arange(10), stream)
        assert stream.done > 0
        assert [end for end, _ in uploader._unread] != []


@interpreted
def test_events_are_used_again() -> None:
    with FakeCuda() as cuda:
        uploader, stream = late_uploader(cuda, under_way=8, batch=2), cuda.new_stream()
        events: set[Any] = set()
        for _ in range(50):
            uploader.upload(np.arange(2), stream)
            events.add(uploader._unread[-1][1])
            cuda.run()
        assert len(events) <= 2


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("under_way", [0, 1 << 16])
def test_numbers_arrive_on_streams_of_a_gpu(under_way: int) -> None:
    rng, gpu = np.random.default_rng(0), torch.device("cuda")
    uploader = IdUploader(gpu, under_way, 3000, id_copier(gpu))
    streams = [torch.cuda.Stream() for _ in range(2)]
    sizes = rng.choice([1, 3, 31, 32, 33, 500, 3000], size=60)
    given = [rng.integers(0, 1 << 40, size=int(size)) for size in sizes]
    seen = [torch.zeros(len(numbers), dtype=torch.int64, device="cuda") for numbers in given]
    torch.cuda.synchronize()
    before = taken_on_the_gpu()
    for i, (numbers, into) in enumerate(zip(given, seen)):
        stream = streams[i // 5 % 2]
        with torch.cuda.stream(stream):
            if i % 7 == 0:
                torch.cuda._sleep(2_000_000)
            into.copy_(uploader.upload(numbers, stream)[: len(numbers)])
    assert taken_on_the_gpu() == before
    torch.cuda.synchronize()
    for numbers, into in zip(given, seen):
        assert np.array_equal(into.cpu().numpy(), numbers)
