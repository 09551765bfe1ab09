"""A tier under random traffic, and ranks that carry out its plans on real bytes.

Every block is filled by compute with words of its own, and every block that is loaded is compared
with what was stored, on every rank, when the stream of compute comes to it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from transfer.fake_cuda import FakeCuda, FakeDriver

from kvoffload_patch.links import LOAD, STORE
from kvoffload_patch.plan import TransferPlan, TransferResult
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies.lru import LRUPolicy
from kvoffload_patch.transfer import engine as copy_engine
from kvoffload_patch.transfer.backends import staged as copy_staged
from kvoffload_patch.transfer.backends import torch as copy_torch
from kvoffload_patch.transfer.backends.base import CopyBackend, Slices, Streams
from kvoffload_patch.transfer.backends.driver import Driver
from kvoffload_patch.transfer.backends.slots import SlotMemory
from kvoffload_patch.transfer.backends.staged import StagedBackend
from kvoffload_patch.transfer.backends.torch import HostChecksums, TorchBackend
from kvoffload_patch.transfer.device import device_of
from kvoffload_patch.transfer.engine import CopyEngine
from kvoffload_patch.transfer.integrity import Checksums
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.memory.host_buffer import HostBuffer
from kvoffload_patch.transfer.queue import CopyQueue

NUM_BLOCKS = 67
NUM_SLOTS = 90
Ids = Sequence[int]


class Flaky:
    """A backend that is slow, and raises now and then, after any number of slices.

    Attributes:
        chance: of a copy to fail.
        delay: called with the stream that a copy begins on.
    """

    def __init__(self, backend: CopyBackend, rng: random.Random) -> None:
        self.name, self.groups = backend.name, backend.groups
        self.checksums = backend.checksums
        self.chance = 0.0
        self.delay: Callable[[Any], None] = lambda stream: None
        self._backend = backend
        self._random = rng

    def load(
        self, gpu_block_ids: Ids, cpu_slots: Ids, streams: Streams | None = None, _: bool = False
    ) -> Slices:
        """Compared, whatever is asked for."""
        self.delay(streams and streams.bus)
        return (yield from self._some(self._backend.load(gpu_block_ids, cpu_slots, streams, True)))

    def store(self, gpu_block_ids: Ids, cpu_slots: Ids, streams: Streams | None = None) -> Slices:
        self.delay(streams and streams.blocks)
        return (yield from self._some(self._backend.store(gpu_block_ids, cpu_slots, streams)))

    def _some(self, slices: Slices) -> Slices:
        left = self._random.randint(0, 4) if self._random.random() < self.chance else -1
        while True:
            try:
                arrived = next(slices)
            except StopIteration as end:
                if left >= 0:
                    raise OSError("the test lets this copy fail at its end") from None
                return end.value
            if left == 0:
                raise OSError("the test lets this copy fail")
            left -= 1
            yield arrived


class Machine:
    """One rank: KV tensors of 32-bit words, slots, and an engine between them.

    Args:
        kind: ``host`` (the CPU device), ``fake`` (queues and streams of a `FakeCuda`), ``cuda``.
        backend: which one.
        chunk: blocks that it moves at once.
        checked: blocks have checksums, with which loads are compared.
        groups: in so many groups of rows loads come, at most.
    """

    def __init__(
        self, kind: str, backend: str, seed: int = 0, chunk: int = 3, checked: bool = False,
        groups: int = 1,
    ) -> None:  # fmt: skip
        self.kind = kind
        self.most_groups = groups
        self.checked = checked
        self.random = random.Random(seed)
        self.device = torch.device("cuda" if kind == "cuda" else "cpu")
        self.cuda = FakeCuda(seed) if kind == "fake" else None
        shapes = [(2, NUM_BLOCKS, 5, 28), (NUM_BLOCKS, 499), (NUM_BLOCKS, 2, 40)]
        tensors = [torch.zeros(shape, dtype=torch.int32, device=self.device) for shape in shapes]
        self.layout = BlockLayout(tensors, NUM_BLOCKS)
        self.host = HostBuffer(
            NUM_SLOTS, self.layout.block_bytes, self.layout.device, piece_bytes=1
        )
        self.host.wait_ready(NUM_SLOTS)
        self.failed: set[int] = set()  # loads, here
        self._seen: list[tuple[torch.Tensor, frozenset[int]]] = []
        self._rows = [row.view(torch.int32) for row in self.layout.rows]
        self._words = [
            torch.arange(row.shape[1], dtype=torch.int32, device=self.device) + 1009 * i
            for i, row in enumerate(self._rows)
        ]
        slots = SlotMemory(self.host.slots, self.host.slots_per_piece)
        with ExitStack() as stack:
            stack.enter_context(self.on_device())
            for module, what, value in [
                (copy_staged, "STORE_SLICE_BYTES", chunk * slots.pitch),
                (copy_staged, "LOAD_SLICE_BYTES", 2 * chunk * slots.pitch),
                (copy_staged, "LOAD_PIECE_BYTES", chunk * slots.pitch),
                (copy_staged, "READY_BLOCKS", 2 * chunk + 1),
                (copy_torch, "STAGING_BYTES", chunk * slots.pitch),
            ]:
                stack.enter_context(mock.patch.object(module, what, value))
            self.backend = Flaky(self._open(backend, slots), self.random)
            self.engine = CopyEngine(self.layout, self.backend, self.host.wait_ready)
            if self.cuda is not None:
                self._take_real_queues()
        self._warm_up()

    def on_device(self) -> AbstractContextManager[Any]:
        return self.cuda or nullcontext()

    def _open(self, name: str, slots: SlotMemory) -> CopyBackend:
        if name == "torch":
            on_host = self.checked and self.kind == "host"
            return TorchBackend(self.layout, slots, HostChecksums(NUM_SLOTS * on_host, self.layout))
        if self.cuda is None:
            driver: Any = Driver()
        else:
            driver = FakeDriver(self.cuda, slots, self.host.slots_per_piece)
        groups = self.layout.cut(self.most_groups, 1) if self.most_groups > 1 else ()
        checksums = Checksums(NUM_SLOTS * self.checked, self.layout.device)
        return StagedBackend(self.layout, slots, driver, checksums, groups)

    def _take_real_queues(self) -> None:
        """Instead of those of the CPU device. What a thread would enqueue, `breathe` does."""
        assert self.cuda is not None
        lock = threading.RLock()
        ahead = copy_engine.STEP_LOAD_SLICES
        self._queues = [
            CopyQueue(self.cuda, lock, False, ahead, groups=len(self.backend.groups)),
            CopyQueue(self.cuda, lock, True, ahead),
        ]
        for link, queue in zip((LOAD, STORE), self._queues):
            self.engine._links[link].queue = queue
        self.engine._device = self.cuda

    def _warm_up(self) -> None:
        """Kernels are loaded when first used, and that waits for what runs."""
        self.write([0], [0])
        self.check([0], [0])
        self.engine.begin_step(None)
        self.finish()

    def write(self, blocks: Ids, values: Ids) -> None:
        """Fill blocks; nothing but the block and its value tells what a word is."""
        ids, scaled = self._upload(blocks, values)

        def fill() -> None:
            for row, words in zip(self._rows, self._words):
                row[ids] = scaled + words

        self._compute(fill)

    def check(
        self, blocks: Ids, values: Ids, tickets: Ids = (), rows: tuple[int, int] | None = None
    ) -> None:
        """Compare blocks, or some rows of them, unless one of these loads turns out to fail."""
        ids, scaled = self._upload(blocks, values)
        bad = torch.zeros((), dtype=torch.int64, device=self.device)
        part = slice(*(rows or (0, len(self._rows))))

        def compare() -> None:
            for row, words in zip(self._rows[part], self._words[part]):
                bad.add_((row[ids] != scaled + words).sum())

        self._compute(compare)
        self._seen.append((bad, frozenset(tickets)))

    def flip(self) -> None:
        """Some bit in some slot is another one from now on."""
        slot, byte = (
            self.random.randrange(NUM_SLOTS),
            self.random.randrange(self.layout.block_bytes),
        )
        self.host.slots[slot, byte] ^= 1 << self.random.randrange(8)

    def spend(self, cycles: int) -> None:
        """Compute that takes its time."""
        if self.kind == "cuda" and cycles:
            torch.cuda._sleep(cycles)

    def breathe(self) -> None:
        """Let some of what goes on beside the step go on."""
        if self.cuda is None:
            return
        with self.cuda:
            for _ in range(self.random.choice([0, 1, 5, 50])):
                if self.random.random() < 0.15:
                    self.random.choice(self._queues).advance()
                else:
                    self.cuda.run_one(self.random.choice([None, *range(5)]))

    def poll(self) -> TransferResult:
        result = TransferResult(*self.engine.poll())
        self.failed.update(result.failed_on(LOAD))
        return result

    def finish(self) -> None:
        with self.on_device():
            self.engine.drain()
            device_of(self.device).synchronize()
            self.poll()

    def wrong(self) -> int:
        """Words that were not what they should be."""
        self.finish()
        return sum(int(bad) for bad, tickets in self._seen if tickets.isdisjoint(self.failed))

    def close(self) -> None:
        with self.on_device():
            self.engine.close()
        del self.engine, self.backend
        self.host.close()

    def _upload(self, blocks: Ids, values: Ids) -> Iterator[torch.Tensor]:
        # Pinned: the host must not wait for the stream of compute.
        ids, scaled = (
            torch.tensor(numbers, dtype=dtype, pin_memory=self.kind == "cuda")
            for numbers, dtype in ((blocks, torch.int64), (values, torch.int32))
        )
        yield ids.to(self.device, non_blocking=True)
        yield scaled.to(self.device, non_blocking=True)[:, None] * 7919

    def _compute(self, call: Callable[[], None]) -> None:
        if self.cuda is not None:
            self.cuda.current.append(call)
        else:
            call()


class Reads(NamedTuple):
    """What a step's forward pass reads: blocks, what they hold, and the loads they came with."""

    blocks: list[int]
    keys: list[int]
    tickets: list[int]


class Traffic:
    """Random steps of a tier. A key is a number that its block's words follow from.

    Args:
        ranks: carry out the plans; the first one reports.
        most: blocks that a step computes, and loads, at most.
    """

    def __init__(self, ranks: Sequence[Machine], seed: int, most: int = 9) -> None:
        self.ranks = ranks
        self.random = random.Random(seed)
        self.most = most
        self.tier = OffloadManager(NUM_SLOTS, LRUPolicy)
        self.last_key = 0
        self.cached: dict[int, int] = {}  # GPU block -> key
        self.loading: dict[int, list[tuple[int, int]]] = {}  # ticket -> destinations and keys
        self.moves = self.loaded = self.by_layer = 0

    def run(self, moves: int) -> None:
        """Steps with so many block moves."""
        while self.moves < moves:
            self.step()
        for rank in self.ranks:
            assert rank.wrong() == 0, f"wrong words on rank {self.ranks.index(rank)}"

    def step(self) -> None:
        reads = Reads([], [], [])
        self._take_arrived(reads)
        self._load(reads)
        writes = self._compute(reads.blocks)
        plan = self.tier.make_plan(lambda block, key: self.cached.get(block) == key)
        if plan is not None:
            self.moves += sum(len(t.source_ids) for t in (*plan.before, *plan.after))
        self.loaded += len(reads.blocks)
        by_layer, lazy = self.random.random() < 0.7, self.random.random() < 0.2
        for rank in self.ranks:
            with rank.on_device():
                self._step_on(rank, plan, reads, writes, by_layer, lazy)
            rank.breathe()
        result = self.ranks[0].poll()
        for rank in self.ranks[1:]:
            rank.poll()
        if self.random.random() < 0.7:
            self.tier.apply(result)

    def _step_on(
        self, rank: Machine, plan: TransferPlan | None, reads: Reads, writes: dict[int, int],
        by_layer: bool, lazy: bool,
    ) -> None:  # fmt: skip
        by_layer = rank.engine.begin_step(plan, by_layer)
        rank.spend(self.random.choice([0, 0, 0, 100_000, 1_000_000]))
        if by_layer:
            self.by_layer += 1
            for group, rows in enumerate(rank.backend.groups):
                rank.engine.wait_group(group)
                rank.check(*reads, rows=rows)
            if self.random.random() < 0.9:  # or the forward pass was given up
                rank.engine.wait_all_groups()
        elif reads.blocks:
            rank.check(*reads)
        if writes:
            rank.write(list(writes), list(writes.values()))
        if not lazy:  # a later step submits the store otherwise
            rank.engine.end_step()

    def _take_arrived(self, reads: Reads) -> None:
        for ticket in [t for t in self.loading if self.tier.load_done(t)]:
            into = self.loading.pop(ticket)
            if self.tier.load_failed(ticket):
                continue
            self.tier.expose_load(ticket)
            self._read(reads, ticket, into)

    def _read(self, reads: Reads, ticket: int, into: list[tuple[int, int]]) -> None:
        self.cached.update(into)
        reads.blocks.extend(block for block, _ in into)
        reads.keys.extend(key for _, key in into)
        reads.tickets.append(ticket)

    def _load(self, reads: Reads) -> None:
        recent = range(max(1, self.last_key - 2 * NUM_SLOTS), self.last_key + 1)
        known = [key for key in recent if self.tier.lookup(key)]
        for _ in range(self.random.choice([0, 1, 1, 2])):
            count = min(len(known), self.random.randint(0, self.most))
            begin = self.random.randint(0, len(known) - count)
            together = self.random.random() < 0.5
            keys = known[begin : begin + count] if together else self.random.sample(known, count)
            into = list(zip(self._hand_out(len(keys), reads.blocks), keys))
            if not into:
                continue
            ticket = self.tier.begin_load([key for _, key in into], [block for block, _ in into])
            if self.random.random() < 0.5:
                self.loading[ticket] = into
            else:
                self.tier.expose_load(ticket)
                self._read(reads, ticket, into)

    def _compute(self, taken: list[int]) -> dict[int, int]:
        writes = {}
        for block in self._hand_out(self.random.randint(0, self.most), taken):
            self.last_key += 1
            writes[block] = self.cached[block] = self.last_key
            self.tier.queue_store(self.last_key, block)
        return writes

    def _hand_out(self, count: int, taken: list[int]) -> list[int]:
        busy = {block for into in self.loading.values() for block, _ in into}.union(taken)
        free = [block for block in range(NUM_BLOCKS) if block not in busy]
        blocks = self.random.sample(free, min(count, len(free)))
        self.tier.note_new_blocks(blocks)
        for block in blocks:
            self.cached.pop(block, None)
        return blocks
