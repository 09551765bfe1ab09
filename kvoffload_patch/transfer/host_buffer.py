"""CPU slots that a device can copy from and to, usable piece by piece as they are registered."""

from __future__ import annotations

import math
import mmap
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.mapping import GIB, HostMapping, no_limit
from kvoffload_patch.transfer.numa import node_of
from kvoffload_patch.transfer.registrar import CudaRegistrar, Registrar

# Registered in one call of the driver, 0.7 ms and more. Such a call holds up other calls that the
# process makes: half of the time if nobody cares, a fifth of it while steps are launched. That
# is still as fast as a GPU computes KV.
PIECE_BYTES = 32 << 20
_PAUSE, _PAUSE_BESIDE_STEPS = 1, 4  # times as long as the call before it took
_STEPS_END_S = 0.1  # after the last one
# Slots begin where copies over the bus and vector accesses are at their best.
_ALIGNMENT = 512


class HostBuffer:
    """``slots``: a ``uint8`` view ``[num_slots, block_bytes]`` of a mapping; its rows are a
    ``pitch`` apart.

    On the CPU device every slot is usable at once, and pages are taken when they are first
    written. On a CUDA device a background thread registers piece after piece, and ``num_ready``
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
        self.num_slots = num_slots
        self.pitch = slot_pitch(block_bytes)
        self.nbytes = num_slots * self.pitch
        on_cpu = device.type == "cpu"
        self.slots_per_piece = num_slots if on_cpu else _slots_per_piece(self.pitch, piece_bytes)
        if mapping is not None and mapping.nbytes < self.nbytes:
            mapping.close()
            mapping = None
        if mapping is None:
            mapping = HostMapping(self.nbytes, None if on_cpu else node_of(device), available_bytes)
        self._mapping = mapping
        rows = mapping.memory[: self.nbytes].view(num_slots, self.pitch)
        self.slots = rows[:, :block_bytes]
        del rows  # or an error would keep the memory for as long as somebody looks at it
        self._growth: _Growth | None = None
        self._finalizers: list[Callable[[], object]] = []
        if not on_cpu:
            self._grow(registrar or CudaRegistrar(device), available_bytes)

    @property
    def num_ready(self) -> int:
        """Slots usable so far, from slot 0 on; never falls."""
        return self.num_slots if self._growth is None else self._growth.num_ready

    @property
    def growing(self) -> bool:
        """Whether more slots are to come."""
        return self.num_ready < self.num_slots and not self.growth_ended

    @property
    def growth_ended(self) -> str:
        """Why there will be no more slots, in a sentence; empty if all are there or coming."""
        return "" if self._growth is None else self._growth.ended

    def wait_ready(self, num_slots: int) -> None:
        """Return once ``num_slots`` slots are usable.

        Raises:
            TransferError: they will never be.
        """
        if self._growth is not None:
            self._growth.wait(num_slots)
        elif num_slots > self.num_slots:
            raise TransferError(f"expected {num_slots} CPU slots, found {self.num_slots} in all.")

    def wait_up_to(self, num_slots: int) -> int:
        """Return how many slots are usable, once it is so many or there will be no more."""
        if self._growth is not None:
            self._growth.wait_up_to(num_slots)
        return self.num_ready

    def step_begins(self) -> None:
        """A step is about to be launched: registering keeps out of its way."""
        if self._growth is not None:
            self._growth.last_step = time.monotonic()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing is registered meanwhile: the driver would make other calls wait for it."""
        with nullcontext() if self._growth is None else self._growth.quiet:
            yield

    def close(self) -> None:
        """Give the memory back. No copy may be under way, and nobody within `quiet`."""
        for finalize in self._finalizers:
            finalize()
        # The mapping goes with the last tensor that refers to it.
        del self.slots
        self._mapping.close()

    def _grow(self, registrar: Registrar, available_bytes: Callable[[], int]) -> None:
        growth = _Growth(self, registrar, available_bytes)
        # Also for a buffer that is dropped unclosed: its addresses may be mapped anew, and the
        # driver would take the new memory for the old. At exit it is only stopped, because the
        # driver may be gone by then.
        unregister = weakref.finalize(self, growth.close)
        unregister.atexit = False
        self._finalizers = [weakref.finalize(self, growth.stop), unregister]
        self._growth = growth
        growth.start()
        try:
            growth.wait(1)
        except BaseException:
            self.close()
            raise


class _Growth:
    """Registers a buffer's pieces in turn; knows the buffer's parts, and not the buffer."""

    def __init__(
        self, host: HostBuffer, registrar: Registrar, available_bytes: Callable[[], int]
    ) -> None:
        self.num_ready = 0
        self.ended = ""
        self.last_step = -_STEPS_END_S
        self._num_slots, self._pitch = host.num_slots, host.pitch
        self._per_piece = host.slots_per_piece
        self._mapping = host._mapping
        self._base = self._mapping.memory.data_ptr()
        self._registrar = registrar
        self._available = available_bytes
        self._registered: list[int] = []
        self._changed = threading.Condition()
        self.quiet = threading.Lock()  # held while the driver registers
        self._stopping = self._over = False
        self._thread = threading.Thread(target=self._run, name="kvoffload-register", daemon=True)

    def start(self) -> None:
        """Begin, on a thread of its own."""
        nbytes = self._num_slots * self._pitch
        self._mapping.keep(nbytes)
        self._mapping.toucher.start(nbytes)
        self._thread.start()

    def wait(self, num_slots: int) -> None:
        """Return once that many slots are usable; TransferError if they never will be."""
        self.wait_up_to(num_slots)
        if self.num_ready < num_slots:
            raise TransferError(
                self.ended or f"expected {num_slots} CPU slots, found {self.num_ready} in all."
            )

    def wait_up_to(self, num_slots: int) -> None:
        """Return once that many slots are usable, or there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_ready >= num_slots or self._over)

    def stop(self) -> None:
        """Return when nothing is registered any more."""
        self._stopping = True
        self._mapping.toucher.stop()
        if self._thread is not threading.current_thread():  # which may collect garbage
            self._thread.join()

    def close(self) -> None:
        """Stop, and take back every registration."""
        self.stop()
        while self._registered:
            self._registrar.unregister(self._registered.pop())

    def _run(self) -> None:
        try:
            why = self._register_all()
            self.ended = self._sentence(why) if why else ""
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
        if why and not self._stopping:
            # What cannot be registered is of no use to anybody here.
            self._mapping.keep(self.num_ready * self._pitch)

    def _register_all(self) -> str:
        """Register piece after piece; why not all, or nothing."""
        try:
            self._registrar.enter()
            why = ""
            while not why and not self._stopping and self.num_ready < self._num_slots:
                why = self._next_piece()
            return why
        except Exception as error:  # noqa: BLE001 - said with the rest; nobody else sees it
            return f"expected to register more CPU memory, found {error}"

    def _next_piece(self) -> str:
        """Register the next piece; why not, or nothing."""
        begin = self.num_ready
        end = min(begin + self._per_piece, self._num_slots)
        if not self._mapping.toucher.wait(end * self._pitch):
            return self._mapping.toucher.ended or "touching it was stopped"
        address, nbytes = self._base + begin * self._pitch, (end - begin) * self._pitch
        with self.quiet:
            began = time.perf_counter()
            error = self._registrar.register(address, nbytes)
            took = time.perf_counter() - began
        if error:
            return f"expected CUDA to register {nbytes >> 20} MiB more, found error {error}"
        self._registered.append(address)
        with self._changed:
            self.num_ready = end
            self._changed.notify_all()
        if begin:  # meanwhile the driver has time for everybody else
            beside_steps = time.monotonic() - self.last_step < _STEPS_END_S
            time.sleep(took * (_PAUSE_BESIDE_STEPS if beside_steps else _PAUSE))
        return ""

    def _sentence(self, why: str) -> str:
        ready, total = (n * self._pitch / GIB for n in (self.num_ready, self._num_slots))
        return (
            f"the CPU tier has {ready:.1f} of {total:.1f} GiB: {why} "
            f"({self._available() / GIB:.1f} GiB of memory available, ulimit -l "
            f"{_locked_limit()}); lower KVOFFLOAD_CPU_GIB, or raise what is short."
        )


def slot_pitch(block_bytes: int) -> int:
    """Bytes from one slot to the next."""
    return -(-block_bytes // _ALIGNMENT) * _ALIGNMENT


def _slots_per_piece(pitch: int, piece_bytes: int) -> int:
    """So many that a piece begins on a page, and on a huge page if that is not too much."""
    page, huge = (size // math.gcd(pitch, size) for size in (mmap.PAGESIZE, 2 << 20))
    step = huge if huge * pitch <= piece_bytes else page
    return max(1, piece_bytes // (step * pitch)) * step


def _locked_limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} kB"
