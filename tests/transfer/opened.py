"""Every way in which blocks can be copied here, opened over a layout and poisoned slots."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from transfer.fake_cuda import FakeCopier, FakeCuda, FakeDriver
from transfer.layouts import Case, equal, needs_gpu

from kvoffload_patch.transfer.backends import direct as copy_direct
from kvoffload_patch.transfer.backends import staged as copy_staged
from kvoffload_patch.transfer.backends import torch as copy_torch
from kvoffload_patch.transfer.backends.base import CopyBackend, Slices, Streams, new_streams
from kvoffload_patch.transfer.backends.direct import DirectBackend
from kvoffload_patch.transfer.backends.driver import Driver
from kvoffload_patch.transfer.backends.slots import SlotMemory
from kvoffload_patch.transfer.backends.staged import StagedBackend
from kvoffload_patch.transfer.backends.torch import HostChecksums, TorchBackend
from kvoffload_patch.transfer.integrity import Checksums, Verdict
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.memory.host_buffer import HostBuffer

NUM_SLOTS = 12
POISON = 0xA5

_interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
_gpu = [pytest.mark.gpu, needs_gpu]
# Backend and device. "packed" is the torch backend's way on devices, in the CPU's memory; "singles"
# is the staged one without the driver's batched call, "groups" that whose loads come row by row.
WAYS = [
    ("torch", "cpu"),
    ("packed", "cpu"),
    ("direct", "cpu"),
    *(pytest.param(n, "cpu", marks=_interpreted) for n in ("staged", "groups")),
    *(pytest.param(n, "cuda", marks=_gpu) for n in ("staged", "groups", "singles", "torch")),
]


class Packed(TorchBackend):
    def __init__(self, layout: BlockLayout, slots: SlotMemory) -> None:
        super().__init__(layout, slots)
        self._direct = False
        self._new_staging(layout, max(1, copy_torch.STAGING_BYTES // slots.pitch))


class Opened:
    """A backend over a layout and slots full of poison.

    Args:
        chunk: slots that a backend moves at once.
        pad: bytes between slots (on a GPU `HostBuffer` says).
        per_piece: slots registered together (on a GPU `HostBuffer` says); 0 for all.
        seed: of the order in which fake streams go on.
        checked: blocks have checksums, with which loads are compared.
        complete: as `Checksums` takes it.
        ready: blocks made ready together; 0: one more than two chunks.
    """

    def __init__(
        self, case: Case, name: str, device: str, chunk: int = 2, pad: int = 0,
        per_piece: int = 0, seed: int = 0, checked: bool = False, complete: bool = True,
        ready: int = 0,
    ) -> None:  # fmt: skip
        self.case = case
        self.checked, self.complete = checked, complete
        self.layout = case.layout()
        self.verdict: Verdict | None = None
        self.cuda = FakeCuda(seed) if device == "cpu" else None
        self.host: HostBuffer | None = None
        if device == "cpu":
            pitch = self.layout.block_bytes + pad
            raw = torch.zeros(NUM_SLOTS * pitch, dtype=torch.uint8)
            slots = raw.view(NUM_SLOTS, pitch)[:, : self.layout.block_bytes]
            self.slots = SlotMemory(slots, per_piece)
        else:
            self.host = HostBuffer(
                NUM_SLOTS, self.layout.block_bytes, self.layout.device, piece_bytes=1
            )
            self.host.wait_ready(NUM_SLOTS)
            self.slots = SlotMemory(self.host.slots, self.host.slots_per_piece)
        self.slots.flat.fill_(POISON)
        with ExitStack() as stack:
            for module, what, value in [
                (copy_staged, "STORE_SLICE_BYTES", chunk * self.slots.pitch),
                (copy_staged, "LOAD_SLICE_BYTES", 2 * chunk * self.slots.pitch),
                (copy_staged, "LOAD_PIECE_BYTES", chunk * self.slots.pitch),
                (copy_direct, "STORE_SLICE_BYTES", chunk * self.slots.pitch),
                (copy_staged, "READY_BLOCKS", ready or 2 * chunk + 1),
                (copy_torch, "STAGING_BYTES", chunk * self.slots.pitch),
            ]:
                stack.enter_context(mock.patch.object(module, what, value))
            if self.cuda is not None:
                stack.enter_context(self.cuda)
            self.driver: Any = None
            self.backend = self._open(name, per_piece)
            self.streams = self._new_streams()

    def _open(self, name: str, per_piece: int) -> CopyBackend:
        if name in ("staged", "singles", "groups"):
            if self.cuda is None:
                self.driver = Driver()
                if name == "singles":
                    self.driver._batch = None
            else:
                self.driver = FakeDriver(self.cuda, self.slots, per_piece)
            groups = self.layout.cut(3, 1) if name == "groups" else ()
            sums = Checksums(self._sums(), self.layout.device, self.complete)
            return StagedBackend(self.layout, self.slots, self.driver, sums, groups)
        if name == "direct":
            assert self.cuda is not None
            self.driver = FakeCopier(self.cuda, self.slots, per_piece)
            return DirectBackend(self.layout, self.slots, self.driver)
        if name == "packed":
            return Packed(self.layout, self.slots)
        host_sums = HostChecksums(self._sums(), self.layout, self.complete)
        return TorchBackend(self.layout, self.slots, host_sums)

    def _sums(self) -> int:
        return NUM_SLOTS if self.checked else 0

    def _new_streams(self) -> Streams | None:
        if self.cuda is None:
            return new_streams(self.layout.device)
        return Streams(self.cuda.new_stream(), self.cuda.new_stream())

    def enqueue(self, start: Callable[..., Slices], ids: list[int], slots: list[int]) -> int:
        """Returns the number of slices; keeps the verdict."""
        with self.cuda or nullcontext():
            slices, count = start(ids, slots, streams=self.streams), 0
            while True:
                try:
                    next(slices)
                except StopIteration as end:
                    self.verdict = end.value
                    return count + 1
                count += 1

    def store(self, ids: list[int], slots: list[int]) -> int:
        return self.enqueue(self.backend.store, ids, slots)

    def load(self, ids: list[int], slots: list[int]) -> int:
        return self.enqueue(partial(self.backend.load, compared=self.checked), ids, slots)

    def wait(self) -> None:
        if self.cuda is None:
            torch.cuda.synchronize()
        else:
            self.cuda.run()

    def wait_for_end(self, direction: str) -> None:
        """Wait for the stream that the end of a copy is on, as `CopyBackend` says."""
        if self.streams is not None:
            stream = self.streams.blocks if direction == "load" else self.streams.bus
            stream.synchronize()

    def poison(self, blocks: list[int]) -> None:
        for block in blocks:
            for view in self.case.views(block):
                view.copy_(torch.full_like(view.view(torch.uint8), POISON).view(view.dtype))

    def wanted(self, block: int) -> torch.Tensor:
        """What a slot must hold for a block."""
        return torch.cat([row[block].cpu() for row in self.layout.rows])

    def close(self) -> None:
        self.wait()
        del self.backend
        self.slots.slots = self.slots.flat = torch.empty(0)
        if self.host is not None:
            self.host.close()


Open = Callable[..., Opened]  # a layout, a way, and how


def store(setup: Opened, source: list[int], slots: list[int]) -> None:
    """Store blocks, and compare all memory there is."""
    case, flat = setup.case, setup.slots.flat
    before = [raw.clone() for raw in case.storages()]
    slots_before = flat.clone()
    setup.store(source, slots)
    setup.wait_for_end("store")
    assert equal(case.storages(), before), "a store changed KV tensors"
    for slot in range(NUM_SLOTS):
        if slot in slots:
            block = source[slots.index(slot)]
            assert torch.equal(setup.slots.slots[slot], setup.wanted(block))
        else:
            span = slice(slot * setup.slots.pitch, (slot + 1) * setup.slots.pitch)
            assert torch.equal(flat[span], slots_before[span]), "a store changed another slot"


def load(setup: Opened, target: list[int], slots: list[int]) -> None:
    """Load slots into blocks, and compare all memory beside them."""
    case = setup.case
    setup.poison(target)
    filled = setup.slots.flat.clone()
    rest = case.untouched(target)
    setup.load(target, slots)
    setup.wait_for_end("load")
    assert torch.equal(setup.slots.flat, filled), "a load changed slots"
    assert equal(case.untouched(target), rest), "a load changed bytes beside its blocks"


def round_trip(setup: Opened, source: list[int], slots: list[int], target: list[int]) -> None:
    """Store blocks and load them into other blocks."""
    stored = {block: setup.case.content(block) for block in source}
    store(setup, source, slots)
    setup.poison(source)
    load(setup, target, slots)
    assert [setup.case.content(b) for b in target] == [stored[b] for b in source]
