"""A mapping of memory that other processes have written to, or are about to."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator

import pytest
from transfer.registrars import Registrar, grown
from transfer.resident import files_opened_since, open_files

from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.memory.mapping import HostMapping

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("small_steps", "no_thread_is_left")
Opens = Callable[..., HostMapping]


@pytest.fixture
def shared() -> Iterator[Opens]:
    """Opens mappings of one file of 64 MiB, as several processes do."""
    file = os.memfd_create("test")
    os.ftruncate(file, 64 * MIB)
    yield lambda nbytes=64 * MIB: HostMapping(nbytes, file=os.open(f"/proc/self/fd/{file}", 2))
    os.close(file)


def pages_of(host: HostMapping) -> int:
    """Bytes of the file that are there."""
    assert host._file is not None
    return os.fstat(host._file).st_blocks * 512


def test_it_is_touched_by_everyone_and_wiped_by_nobody(shared: Opens) -> None:
    one, other = shared(), shared()
    assert pages_of(one) == 0
    one.toucher.start(32 * MIB)
    assert one.toucher.wait(32 * MIB)
    assert pages_of(one) == 32 * MIB
    one.memory[: 32 * MIB].fill_(7)
    other.toucher.start(48 * MIB)
    assert other.toucher.wait(48 * MIB)
    assert pages_of(one) == 48 * MIB
    assert bool((other.memory[: 32 * MIB] == 7).all()), "touching has overwritten what was there"
    assert not other.memory[32 * MIB :].any()
    other.memory[-1] = 5
    assert one.memory[-1] == 5
    for host in (one, other):
        host.close()


def test_what_another_may_use_is_kept_until_all_give_it_back(shared: Opens) -> None:
    one, other = shared(), shared()
    for host in (one, other):
        host.toucher.start(64 * MIB)
        assert host.toucher.wait(64 * MIB)
    other.memory.fill_(7)
    one.keep(16 * MIB)
    assert int(other.memory.min()) == 7 and pages_of(one) == 64 * MIB
    one.give_back(16 * MIB)
    assert pages_of(other) == 16 * MIB
    for host in (one, other):
        host.close()


def test_a_rank_with_fewer_slots_gives_back_nothing_that_others_have(shared: Opens) -> None:
    """The driver refuses it more; another goes on with what both want after a change of size."""
    one, other = shared(), shared()
    less = grown(32, 2 * MIB, Registrar(refuse_at=2), mapping=one)
    more = grown(32, 2 * MIB, Registrar(), mapping=other)
    more.wait_ready(32)
    assert less.wait_up_to(32) == 4 and less.growth_ended
    more.slots[:] = 9
    less.resize(20)
    assert bool((more.slots[:20] == 9).all()) and not more.slots[20:].any()
    for host in (less, more):
        host.close()


def test_a_file_that_is_too_short_is_an_error_and_closed(shared: Opens) -> None:
    before = open_files()
    with pytest.raises(TransferError, match="expected to map"):
        shared(65 * MIB)
    assert not files_opened_since(before)
    host = shared()
    host.close()
    del host
    gc.collect()
    assert not files_opened_since(before)


def test_one_process_at_a_time_is_alone(shared: Opens) -> None:
    one, other, entered = shared(), shared(), threading.Event()

    def enter() -> None:
        with other.alone():
            entered.set()

    thread = threading.Thread(target=enter)
    with one.alone():
        thread.start()
        assert not entered.wait(0.2)
    assert entered.wait(20)
    thread.join()
    mine = HostMapping(MIB)
    with mine.alone():
        pass
    for host in (one, other, mine):
        host.close()
