"""The order of copies and compute on a device, with copies and kernels made slow on purpose.

On the CPU the same tests run without concurrency: what they expect holds there at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tier.plans import a_load, a_plan, a_result, a_store
from transfer.layouts import needs_gpu

from kvoffload_patch.transfer.backends.base import (
    CopyBackend,
    Slices,
    Streams,
    copy_now,
    new_streams,
)
from kvoffload_patch.transfer.backends.driver import Driver
from kvoffload_patch.transfer.backends.slots import SlotMemory
from kvoffload_patch.transfer.backends.staged import StagedBackend
from kvoffload_patch.transfer.backends.torch import TorchBackend
from kvoffload_patch.transfer.engine import CopyEngine
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.memory.host_buffer import HostBuffer

NUM_BLOCKS = 16
NUM_SLOTS = 7
LONG = 50_000_000  # cycles: tens of milliseconds
Ids = Sequence[int]

on_gpu = [pytest.mark.gpu, needs_gpu]
WAYS = [
    ("cpu", "torch"),
    *(pytest.param(("cuda", name), marks=on_gpu) for name in ("staged", "torch")),
]


class SlowBackend:
    """Takes its time before every copy, on the stream where the copy begins."""

    def __init__(self, backend: CopyBackend, device: torch.device) -> None:
        self.name, self.groups = backend.name, backend.groups
        self.load_cycles = self.store_cycles = 0
        self._backend = backend
        self._device = device

    def load(
        self, gpu_block_ids: Ids, cpu_slots: Ids, streams: Streams | None = None, _: bool = False
    ) -> Slices:
        self._sleep(streams and streams.bus, self.load_cycles)
        yield from self._backend.load(gpu_block_ids, cpu_slots, streams)

    def store(self, gpu_block_ids: Ids, cpu_slots: Ids, streams: Streams | None = None) -> Slices:
        self._sleep(streams and streams.blocks, self.store_cycles)
        yield from self._backend.store(gpu_block_ids, cpu_slots, streams)

    def _sleep(self, stream: Any, cycles: int) -> None:
        if stream is not None:
            with torch.cuda.stream(stream):
                sleep(self._device, cycles)


def sleep(device: torch.device, cycles: int) -> None:
    if device.type == "cuda" and cycles:
        torch.cuda._sleep(cycles)


def open_backend(name: str, layout: BlockLayout, slots: SlotMemory) -> CopyBackend:
    if name == "staged":
        return StagedBackend(layout, slots, Driver())
    return TorchBackend(layout, slots)


class Machine:
    """KV tensors of 32-bit numbers, each block filled with one, and an engine for them."""

    def __init__(self, device: str, name: str) -> None:
        self.device = torch.device(device)
        shapes = [(2, NUM_BLOCKS, 33), (NUM_BLOCKS, 40)]
        tensors = [torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes]
        self.layout = BlockLayout(tensors, NUM_BLOCKS)
        self.host = HostBuffer(NUM_SLOTS, self.layout.block_bytes, self.layout.device)
        self.host.wait_ready(NUM_SLOTS)
        self.slots = self.host.slots.view(torch.int32)
        memory = SlotMemory(self.host.slots, self.host.slots_per_piece)
        self.backend = SlowBackend(open_backend(name, self.layout, memory), self.device)
        self.engine = CopyEngine(self.layout, self.backend)
        self._warm_up()

    def _warm_up(self) -> None:
        """Kernels are loaded when first used, and that waits for what runs."""
        self.write(0, 0)
        self.compute(1)
        streams = new_streams(self.device)
        copy_now(self.device, lambda: self.backend.store([0], [0], streams))
        copy_now(self.device, lambda: self.backend.load([0], [0], streams))
        self.read(0)
        self.finish()

    def write(self, block: int, value: int) -> None:
        for view in self.layout.block_views(block):
            view.fill_(value)

    def read(self, block: int) -> torch.Tensor:
        """What a kernel finds in a block when its turn comes."""
        return torch.cat([view.flatten() for view in self.layout.block_views(block)])

    def compute(self, cycles: int = LONG) -> None:
        sleep(self.device, cycles)

    def finish(self) -> None:
        self.engine.drain()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@pytest.fixture(params=WAYS, ids="-".join)
def machine(request: Any) -> Iterator[Machine]:
    made = Machine(*request.param)
    yield made
    made.finish()
    made.engine.close()
    made.host.close()


def holds(values: torch.Tensor, wanted: int) -> bool:
    return bool((values == wanted).all())


def test_a_store_sees_what_the_forward_pass_wrote(machine: Machine) -> None:
    machine.engine.begin_step(a_plan(store=a_store(1, (3,), (2,))))
    machine.compute()
    machine.write(3, 41)
    machine.engine.end_step()
    machine.finish()
    assert holds(machine.slots[2], 41)


def test_a_load_does_not_overwrite_before_earlier_compute_has_read(machine: Machine) -> None:
    machine.slots[2] = 42
    machine.write(3, 7)
    machine.compute()
    seen = machine.read(3)
    machine.engine.begin_step(a_plan(loads=(a_load(1, (3,), (2,)),)))
    machine.finish()
    assert holds(seen, 7)
    assert holds(machine.read(3), 42)


def test_the_forward_pass_waits_for_a_load_that_it_may_read(machine: Machine) -> None:
    machine.slots[2] = 43
    machine.backend.load_cycles = LONG
    plan = a_plan(loads=(a_load(1, (3,), (2,)),), wait_load=1)
    machine.engine.begin_step(plan)
    seen = machine.read(3)
    machine.finish()
    assert holds(seen, 43)


def test_a_later_forward_pass_waits_for_an_earlier_load(machine: Machine) -> None:
    machine.slots[2] = 44
    machine.backend.load_cycles = LONG
    machine.engine.begin_step(a_plan(loads=(a_load(1, (3,), (2,)),)))
    machine.engine.end_step()
    machine.engine.begin_step(a_plan(wait_load=1))
    seen = machine.read(3)
    machine.finish()
    assert holds(seen, 44)


def test_the_forward_pass_waits_for_a_store_of_what_it_overwrites(machine: Machine) -> None:
    machine.backend.store_cycles = LONG
    machine.write(3, 45)
    machine.engine.begin_step(a_plan(store=a_store(1, (3,), (2,))))
    machine.engine.begin_step(a_plan(wait_store=1))
    machine.write(3, 9)
    machine.finish()
    assert holds(machine.slots[2], 45)


def test_a_load_waits_for_a_store_of_the_block_that_it_overwrites(machine: Machine) -> None:
    machine.slots[5] = 9
    machine.backend.store_cycles = LONG
    machine.write(3, 46)
    machine.engine.begin_step(a_plan(store=a_store(1, (3,), (2,))))
    machine.engine.begin_step(a_plan(loads=(a_load(1, (3,), (5,)),), wait_store=1))
    machine.finish()
    assert holds(machine.slots[2], 46)
    assert holds(machine.read(3), 9)


def test_a_load_waits_for_the_store_that_filled_its_slot(machine: Machine) -> None:
    machine.backend.store_cycles = LONG
    machine.write(3, 47)
    machine.engine.begin_step(a_plan(store=a_store(1, (3,), (2,))))
    plan = a_plan(loads=(a_load(1, (4,), (2,)),), wait_load=1, stores_done=1)
    machine.engine.begin_step(plan)
    seen = machine.read(4)
    machine.finish()
    assert holds(seen, 47)


def test_a_store_waits_for_the_load_that_reads_its_slot(machine: Machine) -> None:
    machine.slots[2] = 48
    machine.backend.load_cycles = LONG
    machine.write(3, 9)
    machine.engine.begin_step(a_plan(loads=(a_load(1, (4,), (2,)),)))
    plan = a_plan(store=a_store(1, (3,), (2,)), loads_done=1)
    machine.engine.begin_step(plan)
    machine.finish()
    assert holds(machine.read(4), 48)
    assert holds(machine.slots[2], 9)


def test_the_forward_pass_waits_for_each_load_of_its_plan(machine: Machine) -> None:
    machine.slots[2], machine.slots[4] = 51, 52
    machine.backend.load_cycles = LONG
    loads = (a_load(1, (3,), (2,)), a_load(2, (5,), (4,)))
    machine.engine.begin_step(a_plan(loads=loads, wait_load=2))
    seen = [(machine.read(3), 51), (machine.read(5), 52)]
    machine.finish()
    for values, wanted in seen:
        assert holds(values, wanted)


def test_the_forward_pass_waits_for_loads_of_earlier_steps_too(machine: Machine) -> None:
    machine.slots[2], machine.slots[4] = 53, 54
    machine.backend.load_cycles = LONG
    machine.engine.begin_step(a_plan(loads=(a_load(1, (3,), (2,)),)))
    machine.engine.end_step()
    plan = a_plan(loads=(a_load(2, (5,), (4,)),), wait_load=2)
    machine.engine.begin_step(plan)
    seen, own = machine.read(3), machine.read(5)
    machine.finish()
    assert holds(seen, 53)
    assert holds(own, 54)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["staged", "torch"])
def test_nothing_is_done_before_it_is_and_polling_never_waits(name: str) -> None:
    machine = Machine("cuda", name)
    machine.backend.load_cycles = machine.backend.store_cycles = 20 * LONG
    plan = a_plan(loads=(a_load(1, (3,), (2,)),), store=a_store(1, (4,), (5,)))
    machine.engine.begin_step(plan)
    machine.engine.end_step()
    assert machine.engine.poll()[:2] == a_result(0, 0)[:2], "they are done, so this has waited"
    machine.finish()
    assert machine.engine.poll()[:2] == a_result(1, 1)[:2]
    machine.engine.close()
