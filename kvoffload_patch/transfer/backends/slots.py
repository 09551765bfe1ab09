"""CPU slots as addresses, and batches of blocks and slots made ready for copying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

# Slots and blocks of a batch. Not torch's tensors: on the CPU it would set a team of threads to
# work, in every thread, on what takes one of them microseconds.
Numbers = npt.NDArray[np.int64]


class Run(NamedTuple):
    """Neighbours in a slice: index of the first, its slot, and how many there are."""

    at: int
    slot: int
    size: int


class Part(NamedTuple):
    """One slice of a batch, and its runs: each a column of three arrays.

    ``at`` counts from the beginning of the slice, which is at ``first`` in the batch.
    """

    first: int
    num_slots: int
    at: Numbers
    slot: Numbers
    size: Numbers

    def pieces(self, most: int) -> Iterator[slice]:
        """The runs of each so many slots, where `SlotMemory.parts` was asked for such pieces."""
        cuts = [*np.searchsorted(self.at, range(0, self.num_slots, most)).tolist(), len(self.at)]
        return map(slice, cuts, cuts[1:])

    def slots(self) -> Numbers:
        """Each slot, in order."""
        from_slice: Numbers = np.repeat(self.slot - self.at, self.size)
        return from_slice + np.arange(self.num_slots)

    def runs(self) -> Iterator[Run]:
        """The runs one by one."""
        return map(Run._make, zip(self.at.tolist(), self.slot.tolist(), self.size.tolist()))


class SlotMemory:
    """Where slots are.

    Args:
        slots: ``uint8 [num_slots, block_bytes]``; its first stride is the pitch.
        slots_per_piece: slots that were registered together. A copy must not reach from one
            registration into the next; 0 if there is but one.

    Attributes:
        slots: as given.
        flat: the same as ``uint8 [num_slots * pitch]``.
        pitch: bytes from one slot to the next. What lies between two slots crosses the bus
            with them when they are copied in one.
    """

    def __init__(self, slots: torch.Tensor, slots_per_piece: int = 0) -> None:
        self.slots = slots
        self.flat = slots.as_strided((slots.shape[0] * slots.stride(0),), (1,))
        self.pitch: int = slots.stride(0)
        self._base: int = slots.data_ptr()
        self._piece = slots_per_piece or max(1, slots.shape[0])

    def address(self, slot: Any) -> Any:
        """Of the first byte of a slot; of each slot of an array."""
        return self._base + slot * self.pitch

    def span(self, run: Run) -> torch.Tensor:
        """The bytes of a run of slots, ``uint8 [count * pitch]``."""
        begin = run.slot * self.pitch
        return self.flat[begin : begin + run.size * self.pitch]

    def parts(self, slots: Numbers, chunk: int, piece: int = 0) -> Iterator[Part]:
        """Slices of up to ``chunk`` slots, in runs that can be copied in one.

        Costs nothing for each slot in Python: there may be tens of thousands of them.

        Args:
            piece: slots of a piece of a slice, from which no run reaches into the next one; 0 if
                slices are to have no pieces.
        """
        count = len(slots)
        begins = np.ones(count, dtype=bool)
        begins[1:] = (slots[1:] != slots[:-1] + 1) | (slots[1:] % self._piece == 0)
        for first in range(0, count, chunk):
            begins[first : first + chunk : piece or chunk] = True
        at = begins.nonzero()[0]
        size = np.diff(at, append=count)
        slot = slots[at]
        cuts = [*np.searchsorted(at, range(0, count, chunk)).tolist(), len(at)]
        for first, begin, end in zip(range(0, count, chunk), cuts, cuts[1:]):
            runs = slice(begin, end)
            yield Part(first, min(chunk, count - first), at[runs] - first, slot[runs], size[runs])


def in_slot_order(
    gpu_block_ids: Sequence[int], cpu_slots: Sequence[int]
) -> tuple[Numbers, Numbers]:
    """The pairs by ascending slot: neighbours come together, whatever order they had."""
    blocks = np.array(gpu_block_ids, dtype=np.int64)
    slots = np.array(cpu_slots, dtype=np.int64)
    if (slots[1:] > slots[:-1]).all():
        return blocks, slots
    order = np.argsort(slots)
    return blocks[order], slots[order]
