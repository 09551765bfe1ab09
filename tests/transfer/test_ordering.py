"""The order of copies and compute on a device, with copies and kernels made slow on purpose.

On the CPU the same tests run without concurrency: what they expect holds there at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transfer.layouts import DEVICES

from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.plan import CopyBatch, TransferPlan, TransferResult
from kvoffload_patch.transfer.copy_engine import CopyEngine
from kvoffload_patch.transfer.copy_torch import TorchBackend
from kvoffload_patch.transfer.host_buffer import HostBuffer
from kvoffload_patch.transfer.layout import BlockLayout

NUM_BLOCKS = 16
NUM_SLOTS = 7
LONG = 50_000_000  # cycles: tens of milliseconds


class SlowBackend(TorchBackend):
    """Takes its time before every copy, on the stream of the copy."""

    def __init__(self, layout: BlockLayout, slots: torch.Tensor) -> None:
        super().__init__(layout, slots)
        self.load_cycles: Callable[[], int] = int
        self.store_cycles: Callable[[], int] = int

    def load(self, gpu_block_ids: Sequence[int], cpu_slots: Sequence[int]) -> None:
        sleep(self._device, self.load_cycles())
        super().load(gpu_block_ids, cpu_slots)

    def store(self, gpu_block_ids: Sequence[int], cpu_slots: Sequence[int]) -> None:
        sleep(self._device, self.store_cycles())
        super().store(gpu_block_ids, cpu_slots)


def sleep(device: torch.device, cycles: int) -> None:
    if device.type == "cuda" and cycles:
        torch.cuda._sleep(cycles)


class Machine:
    """KV tensors of 32-bit numbers, each block filled with one, and an engine for them."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        shapes = [(2, NUM_BLOCKS, 33), (NUM_BLOCKS, 500)]
        tensors = [torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes]
        self.layout = BlockLayout(tensors, NUM_BLOCKS)
        self.host = HostBuffer(NUM_SLOTS, self.layout.block_bytes, self.layout.device)
        self.slots = self.host.slots.view(torch.int32)
        self.backend = SlowBackend(self.layout, self.host.slots)
        self.engine = CopyEngine(self.layout, self.backend)
        self._warm_up()

    def _warm_up(self) -> None:
        """Kernels are loaded when first used, and that waits for what runs."""
        self.write(0, 0)
        self.compute(1)
        self.backend.store([0], [0])
        self.backend.load([0], [0])
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


@pytest.fixture(params=DEVICES)
def machine(request: Any) -> Iterator[Machine]:
    made = Machine(request.param)
    yield made
    made.finish()
    made.host.close()


def holds(values: torch.Tensor, wanted: int) -> bool:
    return bool((values == wanted).all())


def test_a_store_sees_what_the_forward_pass_wrote(machine: Machine) -> None:
    machine.engine.begin_step(TransferPlan(store=CopyBatch(1, (3,), (2,))))
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
    machine.engine.begin_step(TransferPlan(loads=(CopyBatch(1, (3,), (2,)),)))
    machine.finish()
    assert holds(seen, 7)
    assert holds(machine.read(3), 42)


def test_the_forward_pass_waits_for_a_load_that_it_may_read(machine: Machine) -> None:
    machine.slots[2] = 43
    machine.backend.load_cycles = lambda: LONG
    plan = TransferPlan(loads=(CopyBatch(1, (3,), (2,)),), wait_load=1)
    machine.engine.begin_step(plan)
    seen = machine.read(3)
    machine.finish()
    assert holds(seen, 43)


def test_a_later_forward_pass_waits_for_an_earlier_load(machine: Machine) -> None:
    machine.slots[2] = 44
    machine.backend.load_cycles = lambda: LONG
    machine.engine.begin_step(TransferPlan(loads=(CopyBatch(1, (3,), (2,)),)))
    machine.engine.end_step()
    machine.engine.begin_step(TransferPlan(wait_load=1))
    seen = machine.read(3)
    machine.finish()
    assert holds(seen, 44)


def test_the_forward_pass_waits_for_a_store_of_what_it_overwrites(machine: Machine) -> None:
    machine.backend.store_cycles = lambda: LONG
    machine.write(3, 45)
    machine.engine.begin_step(TransferPlan(store=CopyBatch(1, (3,), (2,))))
    machine.engine.begin_step(TransferPlan(wait_store=1))
    machine.write(3, 9)
    machine.finish()
    assert holds(machine.slots[2], 45)


def test_a_load_waits_for_a_store_of_the_block_that_it_overwrites(machine: Machine) -> None:
    machine.slots[5] = 9
    machine.backend.store_cycles = lambda: LONG
    machine.write(3, 46)
    machine.engine.begin_step(TransferPlan(store=CopyBatch(1, (3,), (2,))))
    machine.engine.begin_step(TransferPlan(loads=(CopyBatch(1, (3,), (5,)),), wait_store=1))
    machine.finish()
    assert holds(machine.slots[2], 46)
    assert holds(machine.read(3), 9)


def test_a_load_waits_for_the_store_that_filled_its_slot(machine: Machine) -> None:
    machine.backend.store_cycles = lambda: LONG
    machine.write(3, 47)
    machine.engine.begin_step(TransferPlan(store=CopyBatch(1, (3,), (2,))))
    plan = TransferPlan(loads=(CopyBatch(1, (4,), (2,)),), wait_load=1, stores_done=1)
    machine.engine.begin_step(plan)
    seen = machine.read(4)
    machine.finish()
    assert holds(seen, 47)


def test_a_store_waits_for_the_load_that_reads_its_slot(machine: Machine) -> None:
    machine.slots[2] = 48
    machine.backend.load_cycles = lambda: LONG
    machine.write(3, 9)
    machine.engine.begin_step(TransferPlan(loads=(CopyBatch(1, (4,), (2,)),)))
    plan = TransferPlan(store=CopyBatch(1, (3,), (2,)), loads_done=1)
    machine.engine.begin_step(plan)
    machine.finish()
    assert holds(machine.read(4), 48)
    assert holds(machine.slots[2], 9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nothing_is_done_before_it_is_and_polling_never_waits() -> None:
    machine = Machine("cuda")
    machine.backend.load_cycles = machine.backend.store_cycles = lambda: 20 * LONG
    plan = TransferPlan(loads=(CopyBatch(1, (3,), (2,)),), store=CopyBatch(1, (4,), (5,)))
    machine.engine.begin_step(plan)
    machine.engine.end_step()
    assert machine.engine.poll() == (0, 0)
    machine.finish()
    assert machine.engine.poll() == (1, 1)


class Traffic:
    """Random steps of a tier in the GPU blocks of a machine; block contents are counted up."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self.machine = machine
        self.random = random.Random(seed)
        self.tier = OffloadManager(NUM_SLOTS)
        self.value_of: dict[int, int] = {}  # key -> what its block holds
        self.cached: dict[int, int] = {}  # GPU block -> key
        self.loading: dict[int, list[tuple[int, int]]] = {}  # ticket -> destinations and keys
        self.seen: list[tuple[torch.Tensor, int]] = []
        machine.backend.load_cycles = machine.backend.store_cycles = self.cycles

    def cycles(self) -> int:
        return self.random.choice([0, 0, 10_000, 1_000_000, 5_000_000])

    def step(self) -> None:
        arrived = self._arrived()
        reads = arrived + self._load({block for block, _ in arrived})
        writes = self._compute({block for block, _ in reads})
        plan = self.tier.make_plan(lambda block, key: self.cached.get(block) == key)
        engine = self.machine.engine
        engine.begin_step(plan)
        self.machine.compute(self.cycles())
        for block, key in reads:
            self.seen.append((self.machine.read(block), self.value_of[key]))
        for block, value in writes.items():
            self.machine.write(block, value)
        if self.random.random() < 0.8:  # the next step submits the store otherwise
            engine.end_step()
        if self.random.random() < 0.7:
            self.tier.apply(TransferResult(*engine.poll()))

    def check(self) -> int:
        """Returns how many loaded blocks were compared."""
        self.machine.finish()
        self.tier.apply(self.tier.drained())
        for values, wanted in self.seen:
            assert holds(values, wanted), f"{values.unique().tolist()} for {wanted}"
        return len(self.seen)

    def _arrived(self) -> list[tuple[int, int]]:
        found = []
        for ticket in [t for t in self.loading if self.tier.load_done(t)]:
            self.tier.expose_load(ticket)
            found += self.loading.pop(ticket)
        self.cached.update(found)
        return found

    def _load(self, taken: set[int]) -> list[tuple[int, int]]:
        known = sorted(key for key in self.value_of if self.tier.lookup(key))
        keys = self.random.sample(known, min(len(known), self.random.randint(0, 3)))
        if not keys:
            return []
        into = list(zip(self._hand_out(len(keys), taken), keys))
        ticket = self.tier.begin_load([key for _, key in into], [block for block, _ in into])
        if self.random.random() < 0.5:
            self.loading[ticket] = into
            return []
        self.tier.expose_load(ticket)
        self.cached.update(into)
        return into

    def _compute(self, taken: set[int]) -> dict[int, int]:
        writes = {}
        for block in self._hand_out(self.random.randint(0, 4), taken):
            key = writes[block] = len(self.value_of) + 1
            self.value_of[key] = self.cached[block] = key
            self.tier.queue_store(key, block)
        return writes

    def _hand_out(self, count: int, taken: set[int]) -> list[int]:
        busy = {block for into in self.loading.values() for block, _ in into}.union(taken)
        free = [block for block in range(NUM_BLOCKS) if block not in busy]
        blocks = self.random.sample(free, min(count, len(free)))
        self.tier.note_new_blocks(blocks)
        for block in blocks:
            self.cached.pop(block, None)
        return blocks


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_loads_what_was_stored(machine: Machine, seed: int) -> None:
    traffic = Traffic(machine, seed)
    for _ in range(300):
        traffic.step()
    assert traffic.check() > 20, "hardly anything was loaded"
