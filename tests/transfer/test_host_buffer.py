"""`HostBuffer`: as many bytes as asked for, zero, writable, and given back."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transfer.layouts import DEVICES

from kvoffload_patch.transfer import host_buffer
from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.host_buffer import HostBuffer

CPU = torch.device("cpu")


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return True
    return False


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("num_slots", "block_bytes"),
    [(1, 1), (3, 4096), (5, 4097), (7, 1), (1, 2**21 + 1), (1000, 333)],
)
def test_slots_have_the_size_asked_for_are_zero_and_can_be_written(
    num_slots: int, block_bytes: int, device: str
) -> None:
    host = HostBuffer(num_slots, block_bytes, torch.device(device))
    assert host.nbytes == num_slots * block_bytes
    assert host.slots.shape == (num_slots, block_bytes)
    assert host.slots.dtype == torch.uint8
    assert host.slots.device == CPU
    assert host.slots.is_contiguous()
    assert not host.slots.any()
    host.slots.fill_(0xFF)
    host.slots[0, 0] = 1
    host.slots[-1, -1] = 2
    assert int(host.slots.long().sum()) == (3 if num_slots * block_bytes > 2 else 2) + 0xFF * max(
        0, num_slots * block_bytes - 2
    )
    host.close()


def test_memory_is_taken_when_it_is_written_and_given_back_on_close() -> None:
    size = 256 << 20
    before = resident_bytes()
    host = HostBuffer(64, size // 64, CPU)
    assert resident_bytes() - before < size // 4, "memory was taken before it was written"
    host.slots.fill_(1)
    assert resident_bytes() - before > size * 3 // 4
    host.close()
    gc.collect()
    assert resident_bytes() - before < size // 4


def test_the_mapping_goes_with_the_last_tensor_that_refers_to_it() -> None:
    host = HostBuffer(4, 1 << 20, CPU)
    part = host.slots[:, 7:9]
    address = host.slots.data_ptr()
    host.close()
    part.fill_(3)
    assert is_mapped(address)
    assert part.tolist() == [[3, 3]] * 4
    del part
    gc.collect()
    assert not is_mapped(address)


def test_a_system_without_huge_pages_will_do(monkeypatch: Any) -> None:
    class WithoutHugePages(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(host_buffer.mmap, "mmap", WithoutHugePages)
    host = HostBuffer(2, 5, CPU)
    assert host.slots.tolist() == [[0] * 5] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_for_a_gpu_is_registered_until_it_is_closed() -> None:
    host = HostBuffer(4, 1 << 20, torch.device("cuda"))
    slots = host.slots
    assert slots.is_pinned()
    host.close()
    assert not slots.is_pinned()


def test_a_driver_that_refuses_is_an_error_that_says_what_to_do(monkeypatch: Any) -> None:
    class Refusing:
        @staticmethod
        def cudaHostRegister(pointer: int, nbytes: int, flags: int) -> int:  # noqa: N802
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Refusing)
    with pytest.raises(TransferError, match=r"error 2\); lower KVOFFLOAD_CPU_GIB"):
        HostBuffer(2, 4096, torch.device("cuda"))


def test_memory_is_registered_once_whole_and_unregistered_on_close(monkeypatch: Any) -> None:
    calls: list[tuple[Any, ...]] = []

    class Driver:
        @staticmethod
        def cudaHostRegister(*args: int) -> int:  # noqa: N802
            calls.append(args)
            return 0

        @staticmethod
        def cudaHostUnregister(*args: int) -> int:  # noqa: N802
            calls.append(args)
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver)
    host = HostBuffer(3, 4099, torch.device("cuda"))
    address = host.slots.data_ptr()
    host.close()
    assert calls == [(address, 3 * 4099, 0), (address,)]
