"""Many moves of blocks, with copies and compute beside each other: every loaded byte is compared.

``SOAK_MOVES`` says how many; without it 10^5 for the staged backend on a GPU, fewer for others, and
few on the CPU, where fake streams take their time, and most runs use kernels in numpy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transfer import plain_kernels
from transfer.allocations import NoAllocations
from transfer.layouts import needs_gpu
from transfer.traffic import NUM_SLOTS, Machine, Traffic

Build = Callable[..., Machine]

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")


def wanted_moves(default: int) -> int:
    return int(os.environ.get("SOAK_MOVES", default))


@pytest.fixture
def build() -> Iterator[Build]:
    made: list[Machine] = []

    def build_one(*args: Any, **kwargs: Any) -> Machine:
        made.append(Machine(*args, **kwargs))
        return made[-1]

    yield build_one
    for machine in made:
        machine.close()


def saw_something(traffic: Traffic) -> None:
    assert traffic.tier.num_used > NUM_SLOTS // 2
    assert traffic.loaded > traffic.moves // 100, "hardly anything was loaded"


def test_the_cpu_device(build: Build) -> None:
    traffic = Traffic([build("host", "torch")], seed=1)
    traffic.run(wanted_moves(3000))
    saw_something(traffic)


@interpreted
@pytest.mark.parametrize("chance", [0.0, 0.2], ids=["all well", "copies fail"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("groups", [1, 3], ids=["as a whole", "by layer"])
def test_two_ranks_on_fake_streams(build: Build, groups: int, seed: int, chance: float) -> None:
    """Only the first rank reports; the other one is later or earlier, and fails by itself."""
    with plain_kernels.used():
        play_two_ranks(build, groups, seed, chance)


def play_two_ranks(build: Build, groups: int, seed: int, chance: float) -> None:
    ranks = [
        build("fake", "staged", seed=10 * seed + i, chunk=2 + i, checked=seed > 0, groups=groups)
        for i in range(2)
    ]
    for rank in ranks:
        rank.backend.chance = chance
    traffic = Traffic(ranks, seed)
    traffic.run(wanted_moves(250))
    assert traffic.loaded > 30
    assert (traffic.by_layer > 3) == (groups > 1)
    for rank in ranks:
        assert bool(rank.failed) == bool(chance)


def run_with_flips(traffic: Traffic, moves: int) -> None:
    """A bit changes in a few slots in every step."""
    as_made = traffic.step

    def step() -> None:
        as_made()
        for rank in traffic.ranks:
            for _ in range(4):
                rank.flip()

    traffic.step = step  # type: ignore[method-assign]
    traffic.run(moves)


def saw_flips(traffic: Traffic) -> None:
    for rank in traffic.ranks:
        assert rank.failed
        assert rank.backend.checksums.mismatches >= len(rank.failed) > 0


def test_flipped_bits_on_the_cpu_device(build: Build) -> None:
    traffic = Traffic([build("host", "torch", seed=4, checked=True)], seed=4)
    run_with_flips(traffic, 500)
    saw_flips(traffic)


@interpreted
@pytest.mark.parametrize("groups", [1, 4], ids=["as a whole", "by layer"])
def test_flipped_bits_on_fake_streams(build: Build, groups: int) -> None:
    """No load that brings other bytes counts as done, on whichever rank."""
    with plain_kernels.used() if groups > 1 else nullcontext():
        ranks = [build("fake", "staged", seed=i, checked=True, groups=groups) for i in range(2)]
        traffic = Traffic(ranks, seed=0)
        run_with_flips(traffic, 100)
    saw_flips(traffic)


@interpreted
@pytest.mark.parametrize("chunk", [1, 3])
def test_no_step_takes_memory(build: Build, chunk: int) -> None:
    """From plan to driver: or a load that is promised would fail because the device is full."""
    rank = build("fake", "staged", seed=chunk, chunk=chunk, checked=chunk > 2)
    refused = NoAllocations(rank.cuda)
    for name in ("begin_step", "end_step", "poll"):
        setattr(rank.engine, name, refused.guard(getattr(rank.engine, name)))
    for queue in rank._queues:
        queue.advance = refused.guard(queue.advance)  # type: ignore[method-assign]
    traffic = Traffic([rank], seed=chunk)
    with plain_kernels.used():  # which take memory of their own, as work on the device may
        traffic.run(wanted_moves(250))
    assert traffic.loaded > 30
    assert not rank.failed


@pytest.mark.gpu
@needs_gpu
def test_flipped_bits_on_a_device(build: Build) -> None:
    traffic = Traffic([build("cuda", "staged", chunk=7, seed=5, checked=True)], seed=5, most=24)
    run_with_flips(traffic, 20_000)
    saw_flips(traffic)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("backend", "moves"), [("staged", 100_000), ("torch", 30_000)])
def test_a_device(build: Build, backend: str, moves: int) -> None:
    machine = build("cuda", backend, chunk=7, checked=backend == "staged")

    def delay(stream: Any) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(machine.random.choice([0, 0, 0, 10_000, 1_000_000]))

    machine.backend.delay = delay
    traffic = Traffic([machine], seed=3, most=24)
    traffic.run(wanted_moves(moves))
    machine.backend.chance = 0.05
    traffic.run(wanted_moves(moves) * 5 // 4)
    saw_something(traffic)
    assert machine.failed
