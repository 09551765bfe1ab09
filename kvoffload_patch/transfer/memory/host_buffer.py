"""CPU slots that a device can copy from and to, usable piece by piece as they are registered."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from kvoffload_patch.transfer.device import Registrar, device_of
from kvoffload_patch.transfer.errors import NoSlots
from kvoffload_patch.transfer.memory.growth import Growth
from kvoffload_patch.transfer.memory.mapping import HostMapping, no_limit
from kvoffload_patch.transfer.memory.numa import node_of
from kvoffload_patch.transfer.tuning import PIECE_BYTES

# Slots begin where copies over the bus and vector accesses are at their best.
_ALIGNMENT = 512


class HostBuffer:
    """``slots``: a ``uint8`` view ``[num_slots, block_bytes]`` of a mapping; its rows are a
    ``pitch`` apart.

    On the CPU device every slot is usable at once, and pages are taken when they are first
    written. On another device a background thread registers piece after piece, and ``num_ready``
    grows; the first piece is there when the constructor returns. A piece that fails ends the
    growth: what is ready stays usable, and ``growth_ended`` says why.

    Args:
        num_slots: number of slots.
        block_bytes: bytes of a slot that are used.
        device: the device that copies from and to it.
        piece_bytes: what to register at a time, at most, unless that is less than a few slots.
        available_bytes: memory that may still be taken, now.
        mapping: made, and perhaps touched, before; taken over if it is large enough and
            closed if not.
        registrar: instead of the device's own.

    Attributes:
        nbytes: bytes of all slots.
        slots_per_piece: a piece begins at each multiple of it. A copy must not reach from one
            piece into the next.

    Raises:
        TransferError: not even the first piece can be had.
    """

    def __init__(
        self,
        num_slots: int,
        block_bytes: int,
        device: torch.device,
        piece_bytes: int = PIECE_BYTES,
        available_bytes: Callable[[], int] = no_limit,
        mapping: HostMapping | None = None,
        registrar: Registrar | None = None,
    ) -> None:
        self.num_slots = self._wanted = num_slots
        self.pitch = slot_pitch(block_bytes)
        self.nbytes = num_slots * self.pitch
        on_cpu = device_of(device).is_host
        self.slots_per_piece = num_slots if on_cpu else _slots_per_piece(self.pitch, piece_bytes)
        if mapping is not None and mapping.nbytes < self.nbytes:
            mapping.close()
            mapping = None
        if mapping is None:
            mapping = HostMapping(self.nbytes, None if on_cpu else node_of(device), available_bytes)
        self._mapping = mapping
        rows = mapping.memory[: self.nbytes].view(num_slots, self.pitch)
        self.slots = rows[:, :block_bytes]
        del rows  # or an error would keep the memory for as long as its traceback lives
        self._growth: Growth | None = None
        self._unregister: Callable[[], object] = int  # nothing was registered
        if not on_cpu:
            self._grow(registrar or device_of(device).registrar(), available_bytes)

    @property
    def num_ready(self) -> int:
        """Slots usable so far, from slot 0 on; falls by `resize` alone."""
        return self._wanted if self._growth is None else self._growth.num_ready

    @property
    def growing(self) -> bool:
        """Whether more slots are to come."""
        return self.num_ready < self._wanted and not self.growth_ended

    @property
    def growth_ended(self) -> str:
        """Why there will be no more slots, in a sentence; empty if all are there or coming."""
        return "" if self._growth is None else self._growth.ended

    @property
    def growth_spent(self) -> str:
        """Where the time of growing went, in words; empty if every slot was usable at once."""
        return "" if self._growth is None else str(self._growth.spent)

    def wait_ready(self, num_slots: int) -> None:
        """Return once ``num_slots`` slots are usable.

        Raises:
            NoSlots: they will never be.
        """
        if self._growth is not None:
            self._growth.wait(num_slots)
        elif num_slots > self._wanted:
            raise NoSlots(f"expected {num_slots} CPU slots, found {self._wanted} in all.")

    def wait_up_to(self, num_slots: int) -> int:
        """Return how many slots are usable, once it is so many or there will be no more."""
        if self._growth is not None:
            self._growth.wait_up_to(num_slots)
        return self.num_ready

    def step_begins(self, loads_s: float = 0.0, last_slot: int = -1) -> None:
        """A step is about to be launched: registering keeps out of its way.

        Args:
            loads_s: how long the loads that it begins will take.
            last_slot: the highest one that it stores to; -1 if it stores nothing.
        """
        if self._growth is not None:
            self._growth.step_begins(loads_s, last_slot)

    def step_ends(self) -> None:
        """What `step_begins` has announced has been launched."""
        if self._growth is not None:
            self._growth.step_ends()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing is registered meanwhile: the driver would make other calls wait for it.

        Nor is any other process within this that has the same slots.
        """
        growth = nullcontext() if self._growth is None else self._growth.quiet()
        with self._mapping.alone(), growth:
            yield

    def resize(self, num_slots: int) -> None:
        """Use so many slots, `num_slots` at most; what is behind them is given back.

        On a device other than the CPU these are whole pieces, and more become usable as at first.
        No copy may be under way.

        Raises:
            TransferError: the driver does not return from registering a piece.
        """
        self._wanted = num_slots
        if self._growth is not None:
            self._growth.resize(num_slots)
        else:
            self._mapping.give_back(num_slots * self.pitch)

    def wipe(self) -> None:
        """Every slot is zero again. No copy may be under way."""
        if self._growth is None:
            self._mapping.give_back(0)  # pages that nobody has written yet are not taken for it
        else:
            # Registered pages stay where they are, also of slots that were used before a resize.
            self.slots[: self._growth.num_registered].zero_()

    def close(self) -> None:
        """Give the memory back, unless the driver does not return from registering some of it.

        No copy may be under way, and nobody within `quiet`.
        """
        self._unregister()
        # The mapping goes with the last tensor that refers to it.
        del self.slots
        self._mapping.close()

    def _grow(self, registrar: Registrar, available_bytes: Callable[[], int]) -> None:
        growth = Growth(
            self._mapping, self.num_slots, self.pitch, self.slots_per_piece, registrar,
            available_bytes,
        )  # fmt: skip
        # Also for a buffer that is dropped unclosed: its addresses may be mapped again, and the
        # driver would take the new memory for the old. Not at exit: the driver may be gone by then,
        # threads are asked to stop by themselves (`JoinedThread`), and a process that was forked
        # meanwhile would wait for a lock of theirs for ever.
        self._unregister = unregister = weakref.finalize(self, growth.close)
        unregister.atexit = False
        self._growth = growth
        try:
            growth.start()
            growth.wait(1)
        except BaseException:
            self.close()
            raise


def slot_pitch(block_bytes: int) -> int:
    """Bytes from one slot to the next."""
    return -(-block_bytes // _ALIGNMENT) * _ALIGNMENT


def _slots_per_piece(pitch: int, piece_bytes: int) -> int:
    """So many that a piece begins on a page, and on a huge page if that is not too much."""
    page, huge = (size // math.gcd(pitch, size) for size in (mmap.PAGESIZE, 2 << 20))
    step = huge if huge * pitch <= piece_bytes else page
    return max(1, piece_bytes // (step * pitch)) * step
