"""The staged copy backend: pack in device memory, cross the bus by DMA.

A chunk of blocks is packed into a staging buffer at memory speed by one kernel, and crosses the bus
in pieces, between which others' copies have their turn. Each run of neighbouring slots is one copy,
and a piece is one call of the driver. Several buffers keep the bus busy while the next chunk is
packed. Loads mirror it. The kernel makes checksums of what it moves, and of loads that are
compared, compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from kvoffload_patch.transfer.backends.alternating import AlternatingStreams
from kvoffload_patch.transfer.backends.base import Slices, Streams
from kvoffload_patch.transfer.backends.driver import Driver, Runs, RunsOfRows
from kvoffload_patch.transfer.backends.ids import IdUploader
from kvoffload_patch.transfer.backends.load_times import LoadTimes
from kvoffload_patch.transfer.backends.slots import Numbers, Part, SlotMemory, in_slot_order
from kvoffload_patch.transfer.backends.tiles import Check, TileMover, id_copier
from kvoffload_patch.transfer.device import Device, device_of
from kvoffload_patch.transfer.integrity import Checksums, Verdicts
from kvoffload_patch.transfer.layout import BlockLayout, Rows
from kvoffload_patch.transfer.tuning import (
    LOAD_BUFFERS,
    LOAD_PIECE_BYTES,
    LOAD_SLICE_BYTES,
    READY_BLOCKS,
    RUN_BLOCKS,
    STORE_BUFFERS,
    STORE_SLICE_BYTES,
)


class _Buffer:
    """Staging memory, and when its last use is over."""

    def __init__(self, nbytes: int, on: torch.device, device: Device) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=on)
        self.address = self.memory.data_ptr()
        self.filled, self.free = device.new_event(), device.new_event()


class _Slice(NamedTuple):
    """What a buffer holds of some rows of slots, and how it is brought there.

    ``runs`` are of slots, or single slots if most of these have no neighbour; of each, ``slots``
    has the address of its first slot, ``entries`` where it begins in the buffer.
    """

    part: Part
    pieces: list[slice]  # of the runs
    runs: Runs | RunsOfRows
    slots: Numbers
    entries: Numbers
    copy: Callable[[slice, int], None]


class _Direction:
    """What the copies of a direction use, all of it made when the backend is opened.

    ``count`` staging buffers in turn, each for a slice of ``blocks`` slot pitches (``nbytes`` at
    most, or one), the streams of their pieces, and what brings block numbers to the device, beside
    those of their slots where there are checksums. ``totals`` are of the buffer that is packed or
    unpacked, or, by group, of the blocks that were made ready together.
    """

    def __init__(
        self,
        layout: BlockLayout,
        nbytes: int,
        piece_bytes: int,
        pitch: int,
        count: int,
        checked: bool,
        by_group: bool = False,
    ) -> None:
        device = device_of(layout.device)
        self.blocks = max(1, nbytes // pitch)
        self.piece_bytes = piece_bytes
        self.turns = AlternatingStreams(device)
        self.ready_blocks = READY_BLOCKS
        numbers = 2 if checked else 1  # of each block
        self.ids = IdUploader(
            layout.device,
            numbers * layout.num_blocks,
            numbers * READY_BLOCKS,
            id_copier(layout.device),
        )
        # By group, a block is whole only when all that were made ready with it are.
        totals = (READY_BLOCKS if by_group else self.blocks) if checked else 0
        self.totals = torch.zeros(totals, dtype=torch.int64, device=layout.device)
        self.nbytes = self.blocks * pitch  # of a buffer
        self._buffers = [_Buffer(self.nbytes, layout.device, device) for _ in range(count)]
        self._next = 0

    def take(self) -> _Buffer:
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        return buffer

    def piece(self, nbytes: int) -> int:
        """Blocks of a piece, of so many bytes each."""
        return max(1, self.piece_bytes // nbytes)

    def addresses(self) -> list[int]:
        return [buffer.address for buffer in self._buffers]


class StagedBackend:
    """Packs blocks by a kernel and moves them by DMA.

    Args:
        layout: the KV tensors' rows.
        slots: in CPU memory registered with the driver.
        driver: makes the copies.
        checksums: of the slots; None for none.
        groups: of rows, in which loads bring them one after the other.

    Raises:
        torch.OutOfMemoryError: no room for the staging buffers; later copies take no memory.
        TransferError: blocks are too large for checksums.
    """

    name = "staged"

    def __init__(
        self,
        layout: BlockLayout,
        slots: SlotMemory,
        driver: Driver,
        checksums: Checksums | None = None,
        groups: Sequence[Rows] = (),
    ) -> None:
        self._slots = slots
        self._driver = driver
        self._device = device_of(layout.device)
        self.checksums = checksums or Checksums(0, layout.device)
        pitch, checked = self._slots.pitch, self.checksums.kept
        self._stores = _Direction(
            layout, STORE_SLICE_BYTES, STORE_SLICE_BYTES, pitch, STORE_BUFFERS, checked
        )
        self.groups = groups
        self._ends = [*layout.offsets, layout.block_bytes]
        self._loads = _Direction(
            layout, LOAD_SLICE_BYTES, LOAD_PIECE_BYTES, pitch, LOAD_BUFFERS, checked, bool(groups)
        )
        addresses = [*self._stores.addresses(), *self._loads.addresses()]
        self._mover = TileMover(layout, pitch, addresses, self.checksums if checked else None)
        self.load_times = LoadTimes(self._device, LOAD_BUFFERS)
        # A load under way has GPU blocks of its own.
        self._verdicts = Verdicts(self.checksums, layout.num_blocks + 1 if checked else 0)

    def store(
        self,
        gpu_block_ids: Sequence[int],
        cpu_slots: Sequence[int],
        streams: Streams | None = None,
    ) -> Slices:
        """Enqueue GPU blocks to slots: each slice is a staging buffer."""
        assert streams is not None
        blocks, bus, own = streams.blocks, streams.bus, self._stores
        ready = self._ready(gpu_block_ids, cpu_slots, own, blocks, self.checksums.kept)
        parts = self._parts(ready, own)
        for number, (block_ids, slots_at, part) in enumerate(parts):
            if number:
                yield 0
            buffer = own.take()
            blocks.wait_event(buffer.free)
            self._move(True, buffer, block_ids, part, blocks, Check(slots_at, own.totals))
            buffer.filled.record(blocks)
            bus.wait_event(buffer.filled)
            self._cross(True, buffer, part, own, bus)
            buffer.free.record(bus)
        return None

    def load(
        self,
        gpu_block_ids: Sequence[int],
        cpu_slots: Sequence[int],
        streams: Streams | None = None,
        compared: bool = False,
    ) -> Slices:
        """Enqueue slots to GPU blocks: each slice is a staging buffer."""
        load = self._load_groups if self.groups else self._load
        self.load_times.begin()
        if not (compared and self.checksums.kept):
            yield from load(gpu_block_ids, cpu_slots, streams, None)
            return None
        finds, verdict, give_up = self._verdicts.begin()
        try:
            yield from load(gpu_block_ids, cpu_slots, streams, finds)
        except BaseException:
            give_up()
            raise
        return verdict

    def _load(
        self,
        gpu_block_ids: Sequence[int],
        cpu_slots: Sequence[int],
        streams: Streams | None,
        finds: torch.Tensor | None,
    ) -> Iterator[int]:
        assert streams is not None
        blocks, bus, own = streams.blocks, streams.bus, self._loads
        ready = self._ready(gpu_block_ids, cpu_slots, own, blocks, finds is not None)
        parts = self._parts(ready, own)
        for number, (block_ids, slots_at, part) in enumerate(parts):
            if number:
                yield 0
            buffer = own.take()
            bus.wait_event(buffer.free)
            self._cross(False, buffer, part, own, bus)
            self.load_times.crossed(part.num_slots * self._slots.pitch, bus)
            buffer.filled.record(bus)
            blocks.wait_event(buffer.filled)
            check = Check(slots_at, own.totals, 0, finds)
            self._move(False, buffer, block_ids, part, blocks, check)
            buffer.free.record(blocks)
        self.load_times.end(bus)

    def _load_groups(
        self,
        gpu_block_ids: Sequence[int],
        cpu_slots: Sequence[int],
        streams: Streams | None,
        finds: torch.Tensor | None,
    ) -> Iterator[int]:
        """As `_load`, the rows of one group after those of the other; says how many are there.

        No group is there before the last blocks that are made ready together are begun, so these
        are as many as there can be.
        """
        assert streams is not None
        blocks, bus, own = streams.blocks, streams.bus, self._loads
        left, checked = len(cpu_slots), finds is not None
        first = left % own.ready_blocks
        try:
            for block_ids, slots in chain(
                self._ready(gpu_block_ids[:first], cpu_slots[:first], own, blocks, checked),
                self._ready(gpu_block_ids[first:], cpu_slots[first:], own, blocks, checked),
            ):
                left -= len(slots)
                cut: dict[int, list[_Slice]] = {}  # by bytes of a row; mostly one for all groups
                for arrived, rows in enumerate(self.groups, 1):
                    nbytes = self._ends[rows[1]] - self._ends[rows[0]]
                    if nbytes not in cut:
                        cut[nbytes] = [*self._cut(slots, nbytes, own)]
                    last = cut[nbytes][-1]
                    for each in cut[nbytes]:
                        part, buffer = each.part, own.take()
                        bus.wait_event(buffer.free)
                        self._fetch(buffer, each, self._ends[rows[0]], own.turns, bus)
                        self.load_times.crossed(part.num_slots * nbytes, bus)
                        buffer.filled.record(bus)
                        blocks.wait_event(buffer.filled)
                        check = Check(len(slots) + part.first, own.totals, part.first, finds)
                        self._move(False, buffer, block_ids, part, blocks, check, rows)
                        buffer.free.record(blocks)
                        if left or arrived < len(self.groups) or each is not last:
                            yield 0 if left else arrived - (each is not last)
            self.load_times.end(bus)
        except BaseException:
            with self._device.on(blocks):
                self._mover.clear(own.totals)  # some blocks are not whole
            raise

    def _parts(
        self, ready: Iterator[tuple[torch.Tensor, Numbers]], own: _Direction
    ) -> Iterator[tuple[torch.Tensor, int, Part]]:
        """Parts of a buffer each, and the device's list of blocks that each is a part of.

        The slots of a part are in that list, too, from the number in between on, if its checksums
        are made or compared.
        """
        piece = own.piece(self._slots.pitch)
        for block_ids, slots in ready:
            for part in self._slots.parts(slots, own.blocks, piece):
                yield block_ids, len(slots) + part.first, part

    def _ready(
        self,
        gpu_block_ids: Sequence[int],
        cpu_slots: Sequence[int],
        own: _Direction,
        stream: Any,
        checked: bool,
    ) -> Iterator[tuple[torch.Tensor, Numbers]]:
        """Blocks made ready together: the device's list of them, and their slots, ascending."""
        for at in range(0, len(cpu_slots), own.ready_blocks):
            ready = slice(at, at + own.ready_blocks)
            ids, slots = in_slot_order(gpu_block_ids[ready], cpu_slots[ready])
            numbers = np.concatenate((ids, slots)) if checked else ids
            yield own.ids.upload(numbers, stream), slots

    def _move(
        self,
        to_flat: bool,
        buffer: _Buffer,
        block_ids: torch.Tensor,
        part: Part,
        stream: Any,
        check: Check,
        rows: Rows | None = None,
    ) -> None:
        """Enqueue the packing, or unpacking, of a buffer."""
        first, count = part.first, part.num_slots
        self._mover.move(stream, to_flat, buffer.memory, block_ids, first, count, check, rows)

    def _cut(self, slots: Numbers, nbytes: int, own: _Direction) -> Iterator[_Slice]:
        """Slices of so many bytes of each slot."""
        piece, address = own.piece(nbytes), self._slots.address
        for part in self._slots.parts(slots, own.nbytes // nbytes, piece):
            if part.num_slots < RUN_BLOCKS * part.size.size:
                entries = np.arange(part.num_slots) * nbytes
                single = Runs(np.full_like(entries, nbytes))
                pieces = [slice(at, at + piece) for at in range(0, part.num_slots, piece)]
                copy = partial(self._driver.copy_many, single)
                yield _Slice(part, pieces, single, address(part.slots()), entries, copy)
            else:
                runs = RunsOfRows(part.size, nbytes, self._slots.pitch)
                pieces, copy = [*part.pieces(piece)], partial(self._driver.copy_runs_of_rows, runs)
                yield _Slice(part, pieces, runs, address(part.slot), part.at * nbytes, copy)

    def _fetch(
        self, buffer: _Buffer, cut: _Slice, offset: int, turns: AlternatingStreams, bus: Any
    ) -> None:
        """Enqueue the copies of what is at ``offset`` in slots to a buffer."""
        cut.runs.sources[:] = cut.slots + offset
        cut.runs.targets[:] = cut.entries + buffer.address
        for piece in cut.pieces:
            turns.enqueue(bus, cut.copy, piece)

    def _cross(
        self, to_slots: bool, buffer: _Buffer, part: Part, own: _Direction, bus: Any
    ) -> None:
        """Enqueue the copies between a buffer and slots."""
        pitch = self._slots.pitch
        staged, slot = buffer.address + part.at * pitch, self._slots.address(part.slot)
        target, source = (slot, staged) if to_slots else (staged, slot)
        runs = Runs(part.size * pitch)
        runs.targets[:], runs.sources[:] = target, source
        copy = partial(self._driver.copy_many, runs)
        for piece in part.pieces(own.piece(pitch)):
            own.turns.enqueue(bus, copy, piece)
