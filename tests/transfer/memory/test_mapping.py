"""`HostMapping`: pages taken in the background, in order, as far as there is memory."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transfer.resident import is_mapped, kvoffload_threads, resident_bytes

from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.memory import mapping
from kvoffload_patch.transfer.memory.mapping import HostMapping

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "TOUCH_BYTES", MIB)
    monkeypatch.setattr(mapping, "CHECKED_BYTES", 4 * MIB)
    monkeypatch.setattr(mapping, "RESERVE_BYTES", 2 * MIB)
    monkeypatch.setattr(mapping, "MEMORY_PATIENCE_S", 0.2)


def test_nothing_is_taken_before_it_is_asked_for_and_no_more_than_that() -> None:
    before = resident_bytes()
    host = HostMapping(512 * MIB)
    assert host.memory.shape == (512 * MIB,) and host.memory.dtype == torch.uint8
    assert resident_bytes() - before < 16 * MIB
    host.toucher.start(64 * MIB)
    assert host.toucher.wait(64 * MIB)
    assert host.toucher.touched == 64 * MIB
    assert 60 * MIB < resident_bytes() - before < 80 * MIB
    assert not host.memory[: 64 * MIB].any()
    host.close()
    gc.collect()
    assert resident_bytes() - before < 16 * MIB


@pytest.mark.parametrize("nbytes", [1, 4095, MIB - 1, MIB + 1, 5 * MIB + 4096])
def test_odd_sizes_begin_on_a_huge_page_and_are_touched_to_the_end(nbytes: int) -> None:
    host = HostMapping(nbytes)
    assert host.memory.numel() == nbytes
    assert host.memory.data_ptr() % (2 * MIB) == 0
    host.toucher.start(nbytes)
    assert host.toucher.wait(nbytes)
    assert host.toucher.touched == nbytes
    host.memory.fill_(1)
    host.close()


def test_more_than_the_machine_has_can_be_mapped() -> None:
    # A virtual machine that is given memory as it uses it shows a fraction at first.
    host = HostMapping(1 << 42)
    host.memory[-1] = 7
    assert host.memory[-1] == 7
    host.close()


def test_a_system_that_refuses_the_mapping_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(TransferError, match=r"expected to map .* GiB .*; lower KVOFFLOAD_CPU_GIB"):
        HostMapping(1 << 60)


def test_a_system_without_huge_pages_will_do(monkeypatch: Any) -> None:
    class WithoutHugePages(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mapping.mmap, "mmap", WithoutHugePages)
    host = HostMapping(3 * MIB)
    host.toucher.start(3 * MIB)
    assert host.toucher.wait(3 * MIB)
    host.close()


def test_pages_are_taken_by_faults_alone(monkeypatch: Any) -> None:
    # A call that takes many holds up every thread of the process that maps memory meanwhile.
    def refuse(*_: int) -> None:
        raise AssertionError("asked the kernel to populate")

    monkeypatch.setattr(mapping, "advise", refuse)
    before = resident_bytes()
    host = HostMapping(64 * MIB)
    host.toucher.start(64 * MIB)
    assert host.toucher.wait(64 * MIB), host.toucher.ended
    assert resident_bytes() - before > 60 * MIB
    assert not host.memory.any()
    host.close()


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_so_many_threads_touch_and_leave_room_for_each_other(
    threads: int, monkeypatch: Any
) -> None:
    together = threading.Barrier(threads)

    def take(memory: torch.Tensor) -> None:
        if memory.data_ptr() < host.memory.data_ptr() + threads * mapping.TOUCH_BYTES:
            together.wait(20)  # the first step of each, all at the same time

    monkeypatch.setattr(mapping, "touch", take)
    enough = mapping.RESERVE_BYTES + threads * mapping.CHECKED_BYTES
    host = HostMapping(64 * MIB, available_bytes=lambda: enough, threads=threads)
    host.toucher.start(64 * MIB)
    assert host.toucher.wait(64 * MIB), host.toucher.ended
    host.close()
    monkeypatch.setattr(mapping, "MEMORY_PATIENCE_S", 0.0)
    looks: list[int] = []

    def too_little() -> int:
        looks.append(1)
        deadline = time.monotonic() + 20
        while host.toucher._next < threads and time.monotonic() < deadline:
            time.sleep(0.001)  # each has a step to take
        return enough - 1

    host = HostMapping(64 * MIB, available_bytes=too_little, threads=threads)
    host.toucher.start(64 * MIB)
    assert not host.toucher.wait(64 * MIB)
    for thread in host.toucher._threads:
        thread.join(20)
    assert "of memory available to go on" in host.toucher.ended
    assert len(looks) == 1, "who has waited in vain has done so for all"
    host.close()


@pytest.mark.parametrize("ranks, threads", [(1, 8), (8, 4), (64, 2)])
def test_threads_leave_half_of_the_cores_but_there_are_two(
    ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping.os, "sched_getaffinity", lambda _: set(range(64)))
    assert mapping.touch_threads(ranks) == threads


def test_its_pages_are_asked_for_from_its_node_before_any_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int, int]] = []

    def prefer(address: int, nbytes: int, node: int) -> None:
        asked.append((address, nbytes, node))

    monkeypatch.setattr(mapping, "prefer_node", prefer)
    host = HostMapping(5 * MIB + 1, node=1)
    assert asked == [(host.memory.data_ptr(), 5 * MIB + mmap.PAGESIZE, 1)]
    host.close()
    HostMapping(MIB).close()
    assert len(asked) == 1


def test_a_page_that_cannot_be_had_ends_it(monkeypatch: Any) -> None:
    asked: list[int] = []

    def full(memory: torch.Tensor) -> None:
        asked.append(memory.data_ptr())
        if asked[-1] >= host.memory.data_ptr() + 3 * MIB:
            raise OSError(errno.ENOMEM, "no page left")

    host = HostMapping(64 * MIB)
    monkeypatch.setattr(mapping, "touch", full)
    host.toucher.start(64 * MIB)
    assert not host.toucher.wait(64 * MIB)
    host.toucher.stop()  # the other thread may be behind
    assert host.toucher.touched == 3 * MIB
    assert "expected to touch CPU memory, found" in host.toucher.ended
    assert "no page left" in host.toucher.ended
    assert len(asked) < 10, "went on without a page"
    host.close()


def test_a_step_that_is_ahead_does_not_count_before_those_behind_it(monkeypatch: Any) -> None:
    ahead = threading.Event()
    seen: list[int] = []

    def slow_at_first(memory: torch.Tensor) -> None:
        address = memory.data_ptr()
        if address == host.memory.data_ptr():
            ahead.wait(10)
            time.sleep(0.1)
            seen.append(host.toucher.touched)
        elif address > host.memory.data_ptr() + 3 * MIB:
            ahead.set()

    host = HostMapping(8 * MIB)
    monkeypatch.setattr(mapping, "touch", slow_at_first)
    host.toucher.start(8 * MIB)
    assert host.toucher.wait(8 * MIB)
    assert seen == [0]
    host.close()


def test_no_two_threads_take_the_same_piece(monkeypatch: Any) -> None:
    """The later one would write to what is registered and stored to by then."""
    taken: list[int] = []
    monkeypatch.setattr(mapping, "touch", lambda memory: taken.append(memory.data_ptr()))
    monkeypatch.setattr(threading.Event, "is_set", give_way(threading.Event.is_set))
    host = HostMapping(32 * MIB, threads=4)
    host.toucher.start(32 * MIB)
    while kvoffload_threads():  # one that is never taken would be waited for without end
        time.sleep(0.001)
    assert host.toucher.touched == 32 * MIB
    host.close()
    assert sorted(taken) == [min(taken) + step * MIB for step in range(32)]


def give_way(call: Any) -> Any:
    """The same, but every other thread goes on first as far as it can."""

    def called(*args: Any) -> Any:
        time.sleep(0.002)
        return call(*args)

    return called


def test_what_is_free_is_looked_up_before_it_is_taken_and_something_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mapping, "RESERVE_BYTES", 20 * MIB)
    free, taken_at = [100 * MIB], []

    def available() -> int:
        taken_at.append(host.toucher.touched)
        return free[0] - host.toucher.reached

    host = HostMapping(200 * MIB, available_bytes=available)
    host.toucher.start(200 * MIB)
    assert not host.toucher.wait(200 * MIB)
    assert 60 * MIB < host.toucher.touched <= 80 * MIB
    assert "of memory available to go on, found 0.0" in host.toucher.ended
    assert len(taken_at) >= 15, "little is left"
    taken_at.clear()
    free[0] = 1 << 40
    host.toucher.start(200 * MIB)  # more may have become free since
    assert host.toucher.wait(200 * MIB)
    assert not host.toucher.ended
    assert len(taken_at) <= 2, "much is left"
    host.close()


def test_the_more_is_free_the_later_it_is_looked_up_again() -> None:
    """A look takes Python from the loading of the model; others may take a part of it meanwhile."""
    taken_at = []

    def available() -> int:
        taken_at.append(host.toucher.touched)
        return mapping.RESERVE_BYTES + (1 << 30) - host.toucher.touched

    host = HostMapping(512 * MIB, available_bytes=available, threads=1)
    host.toucher.start(512 * MIB)
    assert host.toucher.wait(512 * MIB)
    between = [after - before for before, after in zip(taken_at, taken_at[1:])]
    assert between[0] == (1 << 30) // mapping.LOOK_PARTS and between == sorted(between)[::-1]
    assert between[-1] >= (1 << 29) // mapping.LOOK_PARTS - MIB
    host.close()


def test_pages_behind_what_is_kept_go_back_and_can_be_taken_again() -> None:
    before = resident_bytes()
    host = HostMapping(64 * MIB)
    host.toucher.start(64 * MIB)
    assert host.toucher.wait(64 * MIB)
    host.memory[5 * MIB] = 9
    host.keep(5 * MIB + 1)
    assert resident_bytes() - before < 16 * MIB
    assert host.memory[5 * MIB] == 9
    assert host.toucher.touched <= 5 * MIB + mmap.PAGESIZE
    host.toucher.start(64 * MIB)
    assert host.toucher.wait(64 * MIB)
    assert resident_bytes() - before > 60 * MIB
    host.close()


def test_what_is_kept_and_was_never_touched_is_touched_later() -> None:
    before = resident_bytes()
    host = HostMapping(64 * MIB)
    host.toucher.start(8 * MIB)
    assert host.toucher.wait(8 * MIB)
    host.toucher.stop()
    host.give_back(32 * MIB)
    assert host.toucher.touched == 8 * MIB
    host.toucher.start(32 * MIB)
    assert host.toucher.wait(32 * MIB)
    assert resident_bytes() - before > 30 * MIB
    host.close()


def test_pages_that_the_system_does_not_take_back_are_an_error_unless_it_was_interrupted(
    monkeypatch: Any,
) -> None:
    answers = [errno.EINTR, errno.EAGAIN, 0, errno.EINVAL]

    def madvise(*_: Any) -> int:
        code = answers.pop(0)
        ctypes.set_errno(code)
        return -1 if code else 0

    host = HostMapping(3 * MIB)
    monkeypatch.setattr(mapping, "_madvise", madvise)
    host.give_back(MIB)
    assert answers == [errno.EINVAL], "it was asked until it was done"
    with pytest.raises(OSError, match=f"of {2 * MIB} bytes: EINVAL"):
        host.give_back(MIB)
    monkeypatch.undo()
    host.close()


def test_a_child_process_gets_nothing_of_it() -> None:
    host = HostMapping(4 * MIB)
    address = host.memory.data_ptr()
    host.memory.fill_(1)
    child = os.fork()
    if not child:
        os._exit(17 if is_mapped(address) else 18)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 18
    assert is_mapped(address)
    host.close()


def test_a_core_dump_has_nothing_of_it() -> None:
    host = HostMapping(3 * MIB)
    begin = host.memory.data_ptr()
    flags = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
        elif line.startswith("VmFlags:"):
            flags[first, last] = line.split()[1:]
    (found,) = [flags[span] for span in flags if span[0] <= begin < span[1]]
    assert "dd" in found
    host.close()


def test_memory_that_is_missing_is_looked_up_now_and_then() -> None:
    """Each look takes Python from the loading of the model."""
    looks: list[int] = []
    host = HostMapping(64 * MIB, available_bytes=lambda: looks.append(1) or 0, threads=1)
    host.toucher.start(64 * MIB)
    assert not host.toucher.wait(64 * MIB)
    assert 2 <= len(looks) < 10, "for so long as it is waited for"
    host.close()


def test_stopped_it_tells_who_waits() -> None:
    host = HostMapping(64 * MIB, available_bytes=lambda: 0)
    told: list[bool] = []
    waiter = threading.Thread(target=lambda: told.append(host.toucher.wait(MIB)))
    host.toucher.start(64 * MIB)
    waiter.start()
    host.toucher.stop()
    waiter.join(10)
    assert told == [False]
    assert kvoffload_threads() == []
    host.close()


def test_dropped_it_stops_and_goes() -> None:
    host = HostMapping(256 * MIB, available_bytes=lambda: sys.maxsize)
    address = host.memory.data_ptr()
    host.toucher.start(256 * MIB)
    del host
    gc.collect()
    assert kvoffload_threads() == []
    assert not is_mapped(address)


def test_no_piece_is_touched_again_while_a_thread_is_still_at_it(monkeypatch: Any) -> None:
    """It would write to that when slots there hold blocks."""
    go = threading.Event()
    monkeypatch.setattr(mapping, "touch", lambda memory: go.wait(60))
    monkeypatch.setattr(mapping, "EXIT_S", 0.01)
    made = HostMapping(4 * MIB, threads=1)
    made.toucher.start(2 * MIB)
    with pytest.raises(TransferError, match="found that it has not"):
        made.toucher.start(4 * MIB)
    go.set()
    monkeypatch.setattr(mapping, "EXIT_S", 30.0)
    made.toucher.start(4 * MIB)
    assert made.toucher.wait(4 * MIB)
    made.close()
