"""CPU memory mapped by ourselves, alone or with other ranks, and taken in the background.

PyTorch's pinned allocator rounds up to powers of two, which at tens of GiB is what gets a
process killed; an anonymous mapping takes what is asked for. It holds no page until one is
touched. Touching tens of GiB takes seconds, so threads do it, from the first byte on.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from kvoffload_patch.memory import RESERVE_BYTES
from kvoffload_patch.threads import EXIT_S, JoinedThread
from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.memory.numa import prefer_node
from kvoffload_patch.transfer.tuning import (
    CHECKED_BYTES,
    LOOK_PARTS,
    MEMORY_PATIENCE_S,
    MOST_TOUCH_THREADS,
    TOUCH_BYTES,
    TOUCH_THREADS,
)

GIB = 1 << 30

_HUGE_PAGE = 2 << 20
_MAP_NORESERVE = 0x4000


def no_limit() -> int:
    """What is available where nobody counts."""
    return sys.maxsize


class HostMapping:
    """A mapping: ``memory``, a ``uint8`` tensor ``[nbytes]``, zero at first.

    Args:
        nbytes: bytes to map.
        node: the NUMA node that its pages should come from; None leaves that to the system.
        available_bytes: memory that may still be taken, now.
        file: a descriptor of a file of so many bytes in memory, which other processes map as well;
            closed with the mapping, or by an error. None: pages of this process alone.
        threads: that touch pages.

    Raises:
        TransferError: the system refuses to map as much, or the file is too short.
    """

    def __init__(
        self,
        nbytes: int,
        node: int | None = None,
        available_bytes: Callable[[], int] = no_limit,
        file: int | None = None,
        threads: int = TOUCH_THREADS,
    ) -> None:
        self.nbytes = nbytes
        self._file = file
        self._close_file = weakref.finalize(self, _close, file)
        # Not accounted for: a system that does would compare the whole of it with what a
        # virtual machine happens to have at its start.
        try:
            if file is None:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
                mapped = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=flags)
            else:
                mapped = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | _MAP_NORESERVE)
        except (OSError, ValueError) as error:  # ValueError: the file is shorter
            self._close_file()
            raise TransferError(
                f"expected to map {nbytes / GIB:.1f} GiB of CPU memory, found {error}; lower "
                "KVOFFLOAD_CPU_GIB or allow overcommitment (vm.overcommit_memory)."
            ) from error
        # A child process gets none of it: pages that a device uses would be copied at the fork. Nor
        # does a core dump: it would be as large, and has what users have asked.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK", "MADV_DONTDUMP"):
            with suppress(OSError, AttributeError):  # a kernel, or a Python, without it
                mapped.madvise(getattr(mmap, advice))
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        # Of a file every rank has the same bytes, wherever these come to lie.
        begin = -flat.data_ptr() % _HUGE_PAGE if file is None else 0
        self.memory = flat[begin : begin + nbytes]
        if node is not None:
            prefer_node(self.memory.data_ptr(), _whole_pages(nbytes), node)
        self.toucher = Toucher(self.memory, available_bytes, file is not None, threads)
        # The threads know the toucher only, so that a mapping that is dropped stops them.
        self._stop = weakref.finalize(self, self.toucher.stop)
        self._stop.atexit = False  # the end of the process waits for threads by itself

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other process that maps it is within this."""
        if self._file is None:
            yield
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def keep(self, nbytes: int) -> None:
        """Stop touching, and give back every page behind the first ``nbytes``.

        Of a shared mapping nothing is given back: others may have registered these pages.
        """
        self.toucher.stop()
        if self._file is None and self.toucher.reached > min(_whole_pages(nbytes), self.nbytes):
            self.give_back(nbytes)

    def give_back(self, nbytes: int) -> None:
        """Give back every page behind the first ``nbytes``, no matter who has touched it.

        No device may be using them, and no thread be touching any. Of a shared mapping every
        process gives back the same pages.
        """
        kept = min(_whole_pages(nbytes), self.nbytes)
        if kept < self.nbytes:
            advice = mmap.MADV_DONTNEED if self._file is None else mmap.MADV_REMOVE
            advise(self.memory.data_ptr() + kept, self.nbytes - kept, advice)
        self.toucher.forget_beyond(kept)

    def close(self) -> None:
        """Stop, and give everything back once no tensor refers to the mapping any more."""
        self._stop()
        self._close_file()
        del self.memory, self.toucher


class Toucher:
    """Takes the pages of a mapping from the system, in the order of their addresses.

    Args:
        memory: ``uint8 [nbytes]``, beginning on a page.
        available_bytes: memory that may still be taken, now.
        is_shared: other processes may have written to it.
        threads: as many as `CHECKED_BYTES` allows for, at most.

    Attributes:
        ended: why not everything asked for is touched; empty while there is hope.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        available_bytes: Callable[[], int],
        is_shared: bool = False,
        threads: int = TOUCH_THREADS,
    ) -> None:
        self._memory = memory
        self._is_shared = is_shared
        self._nbytes = int(memory.numel())
        self._available = available_bytes
        self._num_threads = threads
        self._changed = threading.Condition()
        self._looking = threading.Lock()
        self._stopping = threading.Event()
        self._threads: list[JoinedThread] = []
        self._done: set[int] = set()  # steps done beyond the prefix
        self._prefix = self._next = self._goal = 0  # in steps
        self._looks_at = 0  # the step before which memory is looked up again
        self._kept = 0  # bytes from the start on that may be in use, and are not touched again
        self.ended = ""

    @property
    def touched(self) -> int:
        """Bytes from the start on that are there; never falls while a goal is pursued."""
        return min(max(self._prefix * TOUCH_BYTES, self._kept), self._nbytes)

    @property
    def reached(self) -> int:
        """Where the last page that may have been taken ends."""
        return min(max(self._next * TOUCH_BYTES, self._kept), self._nbytes)

    def start(self, nbytes: int) -> None:
        """Touch the first ``nbytes`` in the background; also after it has ended or stopped.

        Raises:
            TransferError: a thread is still at a piece, and would write to it when it is in use.
        """
        self.stop()
        if self._threads:
            raise TransferError(
                f"expected the system to give {TOUCH_BYTES >> 20} MiB of CPU memory within "
                f"{EXIT_S:.0f} s, found that it has not; lower KVOFFLOAD_CPU_GIB, or free memory."
            )
        self._stopping.clear()
        self.ended = ""
        self._goal = -(-min(nbytes, self._nbytes) // TOUCH_BYTES)
        self._next = self._looks_at = self._prefix  # what lies behind may be touched again
        self._done.clear()
        for i in range(min(self._num_threads, self._goal - self._prefix)):
            thread = JoinedThread(self._run, f"kvoffload-touch-{i}", self.ask_to_stop)
            self._threads.append(thread)
            thread.start()

    def wait(self, nbytes: int) -> bool:
        """Return once the first ``nbytes`` are touched: True; or will not be: False."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.touched >= nbytes or self.ended or self._stopping.is_set()
            )
            return self.touched >= nbytes

    def ask_to_stop(self) -> None:
        """No thread touches any more soon."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()

    def stop(self) -> None:
        """Return when no thread touches any more, or none that does ends."""
        self.ask_to_stop()
        for thread in self._threads:
            if thread is not threading.current_thread():  # which may collect garbage
                thread.join(EXIT_S)
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    def forget_beyond(self, nbytes: int) -> None:
        """Pages behind ``nbytes`` have been given back; nothing runs."""
        self._kept = min(self.touched, nbytes)
        self._prefix = min(self._prefix, nbytes // TOUCH_BYTES)
        self._next = self._prefix

    def _run(self) -> None:
        try:
            while not self.ended:
                with self._changed:
                    step = self._next
                    if step >= self._goal or self._stopping.is_set():
                        return
                    self._next += 1
                if step >= self._looks_at and not self._looked_up(step):
                    return
                self._touch(step)
        except Exception as error:  # noqa: BLE001 - raised again by the caller that waits
            self._end(f"expected to touch CPU memory, found {error}")

    def _looked_up(self, step: int) -> bool:
        """Whether there is memory for this step; who waits for another's look has its answer."""
        with self._looking:
            return not self.ended and (step < self._looks_at or self._room(step))

    def _touch(self, step: int) -> None:
        begin = max(step * TOUCH_BYTES, self._kept)
        take = reach if self._is_shared else touch
        if begin < (end := (step + 1) * TOUCH_BYTES):
            take(self._memory[begin:end])
        with self._changed:
            self._done.add(step)
            while self._prefix in self._done:
                self._done.remove(self._prefix)
                self._prefix += 1
            self._changed.notify_all()

    def _room(self, step: int) -> bool:
        """Whether there is memory for what will be touched until the next look, after waiting.

        The more there is, the later that comes: a look takes Python from the loading of the model.
        """
        needed = min(CHECKED_BYTES * self._num_threads, self._nbytes) + RESERVE_BYTES
        deadline, pause = time.monotonic() + MEMORY_PATIENCE_S, 0.05
        while not self._stopping.is_set():
            found = self._available()
            if found >= needed:
                more = max(CHECKED_BYTES, (found - RESERVE_BYTES) // LOOK_PARTS)
                self._looks_at = step + more // TOUCH_BYTES
                return True
            if time.monotonic() >= deadline:
                self._end(
                    f"expected {needed / GIB:.1f} GiB of memory available to go on, found "
                    f"{found / GIB:.1f}"
                )
                return False
            self._stopping.wait(pause)
            pause = min(2 * pause, 0.5)
        return False

    def _end(self, why: str) -> None:
        with self._changed:
            self.ended = self.ended or why
            self._changed.notify_all()


def touch_threads(ranks: int) -> int:
    """How many threads of a rank touch memory, where so many ranks may be on this host."""
    cores = len(os.sched_getaffinity(0))
    return min(MOST_TOUCH_THREADS, max(TOUCH_THREADS, cores // (2 * ranks)))


def touch(memory: torch.Tensor) -> None:
    """Take the pages of a piece that nobody has written to yet; holds no GIL meanwhile.

    By page faults, one for each page: the kernel serves them under the lock of this mapping alone.
    Under MADV_POPULATE_WRITE it holds that of the address space, and every thread of the process
    that maps memory, the driver's callers among them, waits for tens of milliseconds.
    """
    memory[:: mmap.PAGESIZE].zero_()


def reach(memory: torch.Tensor) -> None:
    """Take the pages of a piece that other processes may have written to; as `touch` does.

    A file in memory gets a page when one is read, too, and what is there already stays as it is.
    """
    memory[:: mmap.PAGESIZE].max()


def _close(file: int | None) -> None:
    if file is not None:
        os.close(file)


def advise(address: int, nbytes: int, advice: int) -> None:
    """madvise(2), at an address that begins a page; asks again when it is interrupted."""
    while _madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(advice)):
        code = ctypes.get_errno()
        if code not in (errno.EINTR, errno.EAGAIN):
            raise OSError(code, f"madvise({advice}) of {nbytes} bytes: {errno.errorcode[code]}")


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


_madvise = ctypes.CDLL(None, use_errno=True).madvise
