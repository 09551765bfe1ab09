"""`HostBuffer`: slots of the right size, usable piece by piece, and given back."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import subprocess
import sys

import pytest
import torch
from transfer.layouts import DEVICES
from transfer.registrars import Registrar, grown
from transfer.resident import is_mapped, kvoffload_threads, resident_bytes

from kvoffload_patch.transfer.errors import NoSlots
from kvoffload_patch.transfer.memory.host_buffer import HostBuffer
from kvoffload_patch.transfer.memory.mapping import HostMapping

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("small_steps", "no_thread_is_left")


# What slots are


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("num_slots", "block_bytes"),
    [(1, 1), (3, 4096), (5, 4097), (7, 1), (1, 2**21 + 1), (1000, 333)],
)
def test_slots_have_the_size_asked_for_are_zero_and_can_be_written(
    num_slots: int, block_bytes: int, device: str
) -> None:
    host = HostBuffer(num_slots, block_bytes, torch.device(device))
    host.wait_ready(num_slots)
    assert host.pitch % 512 == 0 and 0 <= host.pitch - block_bytes < 512
    assert host.nbytes == num_slots * host.pitch
    assert host.slots.shape == (num_slots, block_bytes)
    assert host.slots.stride() == (host.pitch, 1)
    assert host.slots.dtype == torch.uint8
    assert host.slots.device == CPU
    assert not host.slots.any()
    for slot in range(num_slots):
        host.slots[slot].fill_(slot % 251 + 1)
    assert all(bool((host.slots[i] == i % 251 + 1).all()) for i in range(num_slots))
    host.close()


def test_on_the_cpu_every_slot_is_usable_at_once() -> None:
    host = HostBuffer(100, 4096, CPU)
    assert (host.num_ready, host.slots_per_piece, host.growth_ended) == (100, 100, "")
    host.wait_ready(100)
    with pytest.raises(NoSlots, match="expected 101 CPU slots, found 100 in all"):
        host.wait_ready(101)
    host.close()


def test_on_the_cpu_memory_is_taken_when_it_is_written_and_given_back_on_close() -> None:
    size = 256 << 20
    before = resident_bytes()
    host = HostBuffer(64, size // 64, CPU)
    assert resident_bytes() - before < size // 4, "memory was taken before it was written"
    host.slots.fill_(1)
    assert resident_bytes() - before > size * 3 // 4
    host.close()
    gc.collect()
    assert resident_bytes() - before < size // 4


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_the_mapping_goes_with_the_last_tensor_that_refers_to_it(device: torch.device) -> None:
    host = HostBuffer(4, 1 << 20, device, registrar=Registrar())
    part = host.slots[:, 7:9]
    address = host.slots.data_ptr()
    host.close()
    part.fill_(3)
    assert is_mapped(address)
    assert part.tolist() == [[3, 3]] * 4
    del part
    gc.collect()
    assert not is_mapped(address)


# Pieces


@pytest.mark.parametrize("block_bytes", [512, 4096, 100_000, 2 * MIB, 2 * MIB + 1, 5 * MIB])
@pytest.mark.parametrize("num_slots", [1, 40, 97])
def test_registrations_cover_every_slot_once_and_split_none(
    num_slots: int, block_bytes: int
) -> None:
    registrar = Registrar()
    host = grown(num_slots, block_bytes, registrar, piece_bytes=8 * MIB)
    host.wait_ready(num_slots)
    base, end = host.slots.data_ptr(), host.slots.data_ptr() + host.nbytes
    assert [a for a, _ in registrar.asked] == list(
        range(base, end, host.slots_per_piece * host.pitch)
    )
    assert all(a + n == b for (a, n), (b, _) in zip(registrar.asked, registrar.asked[1:]))
    assert sum(registrar.asked[-1]) == end
    assert all(address % mmap.PAGESIZE == 0 for address, _ in registrar.asked)
    assert (host.num_ready, host.growth_ended) == (num_slots, "")
    host.close()
    assert registrar.held == {}


# What ends the growth


# The end


def test_a_buffer_that_is_dropped_unclosed_leaves_nothing() -> None:
    registrar = Registrar()
    host = grown(64, 2 * MIB, registrar)
    address = host.slots.data_ptr()
    del host
    gc.collect()
    assert registrar.held == {}
    assert kvoffload_threads() == []
    assert not is_mapped(address)


def test_a_process_may_end_while_a_buffer_grows() -> None:
    code = (
        "import atexit, time\n"
        "def after():\n"
        "    before = len(slow.asked)\n"
        "    time.sleep(0.5)\n"
        "    print(len(slow.asked) - before)\n"
        "atexit.register(after)\n"  # before others are, so that it runs after them
        "import torch\n"
        "from transfer.registrars import Registrar\n"
        "from kvoffload_patch.transfer.memory.host_buffer import HostBuffer\n"
        "slow = Registrar(before=lambda i: time.sleep(0.05 if i else 0))\n"
        "host = HostBuffer(512, 1 << 20, torch.device('cuda', 0), 1 << 20, registrar=slow)\n"
        "host._mapping.toucher.wait(512 << 20)\n"
        "print(0 < host.num_ready < 512)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env={"PYTHONPATH": ":".join(sys.path)}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n0\n", "")


# Memory taken before


def test_a_forked_process_ends_though_a_thread_that_it_lacks_held_a_lock() -> None:
    """An engine in its user's own process: that may fork whenever it likes."""
    code = (
        "import os, sys, threading\n"
        "from transfer.registrars import Registrar, grown\n"
        "host = grown(64, 1 << 20, Registrar())\n"
        "lock, held = host._mapping.toucher._changed, threading.Event()\n"
        "def touch():\n"
        "    with lock:\n"
        "        held.set()\n"
        "        end.wait()\n"
        "end = threading.Event()\n"
        "thread = threading.Thread(target=touch)\n"
        "thread.start()\n"
        "held.wait()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    sys.exit(7)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "end.set()\n"
        "thread.join()\n"
        "sys.exit(os.waitstatus_to_exitcode(status))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(command, env=env, start_new_session=True) as process:
        try:
            assert process.wait(30) == 7
        finally:
            with contextlib.suppress(ProcessLookupError):  # the fork, if it hangs
                os.killpg(process.pid, signal.SIGKILL)


def test_a_mapping_made_before_is_taken_over_with_its_pages() -> None:
    early = HostMapping(64 * MIB)
    address = early.memory.data_ptr()
    early.toucher.start(48 * MIB)
    assert early.toucher.wait(48 * MIB)
    before = resident_bytes()
    registrar = Registrar()
    host = grown(16, 2 * MIB, registrar, mapping=early)
    host.wait_ready(16)
    assert host.slots.data_ptr() == address == registrar.asked[0][0]
    assert before - resident_bytes() > 12 * MIB, "pages behind the slots were kept"
    host.close()
    del early
    gc.collect()
    assert not is_mapped(address)


def test_a_mapping_that_is_touched_in_part_is_touched_to_the_end() -> None:
    early = HostMapping(64 * MIB)
    early.toucher.start(10 * MIB)
    before = resident_bytes()
    host = grown(32, 2 * MIB, Registrar(), mapping=early)
    host.wait_ready(32)
    assert resident_bytes() - before > 40 * MIB
    host.close()


def test_a_mapping_that_is_too_small_is_given_back() -> None:
    before = resident_bytes()
    early = HostMapping(126 * MIB)
    early.toucher.start(126 * MIB)
    assert early.toucher.wait(126 * MIB)
    host = grown(64, 2 * MIB, Registrar(), mapping=early)
    host.wait_ready(64)
    assert 120 * MIB < resident_bytes() - before < 140 * MIB
    host.close()


# With a driver


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_for_a_gpu_is_registered_until_it_is_closed() -> None:
    host = HostBuffer(64, MIB, torch.device("cuda"), piece_bytes=4 * MIB)
    host.wait_ready(64)
    slots = host.slots
    assert all(slots[i].is_pinned() for i in range(64))
    host.close()
    assert not any(slots[i].is_pinned() for i in range(64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("num_slots", "block_bytes"), [(40, MIB + 512), (100_000, 4096)])
def test_slots_at_the_edges_of_pieces_hold_what_was_copied(
    num_slots: int, block_bytes: int
) -> None:
    host = HostBuffer(num_slots, block_bytes, torch.device("cuda"), piece_bytes=16 * MIB)
    host.wait_ready(num_slots)
    edges = range(0, num_slots, host.slots_per_piece)
    chosen = sorted({i for e in edges for i in (e - 1, e, e + 1) if 0 <= i < num_slots})
    chosen += [num_slots - 1]
    sent = torch.randint(0, 256, (len(chosen), block_bytes), dtype=torch.uint8, device="cuda")
    for row, slot in zip(sent, chosen):
        host.slots[slot].copy_(row, non_blocking=True)
    torch.cuda.synchronize()
    returned = torch.empty_like(sent)
    for row, slot in zip(returned, chosen):
        row.copy_(host.slots[slot], non_blocking=True)
    assert torch.equal(sent, returned)
    assert torch.equal(sent.cpu(), host.slots[chosen])
    host.close()


def test_slots_that_are_wiped_are_zero_and_as_many_as_before() -> None:
    host = HostBuffer(8, MIB, torch.device("cpu"))
    host.slots[:] = 1
    host.wipe()
    assert host.num_ready == 8 and not host.slots.any()
    host.slots[5] = 1
    assert host.slots[5].all() and not host.slots[6].any()
    host.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_registered_slots_are_wiped_where_they_are() -> None:
    host = HostBuffer(64, MIB, torch.device("cuda"), piece_bytes=4 * MIB)
    host.wait_ready(64)
    host.slots[:] = 1
    host.wipe()
    assert not host.slots.any() and all(host.slots[i].is_pinned() for i in range(64))
    host.close()


def test_fewer_slots_on_the_cpu_give_their_pages_back() -> None:
    host = HostBuffer(8, MIB, torch.device("cpu"))
    host.slots[:] = 1
    host.resize(3)
    assert (host.num_ready, host.growing) == (3, False)
    assert host.slots[:3].all() and not host.slots[3:].any()
    with pytest.raises(NoSlots, match="expected 4 CPU slots, found 3 in all"):
        host.wait_ready(4)
    host.resize(8)
    assert host.num_ready == 8 and host.slots[:3].all()
    host.close()
