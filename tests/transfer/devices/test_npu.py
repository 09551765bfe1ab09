"""An Ascend NPU, by a stand-in for torch_npu and a compiled one for AscendCL.

No such device has run any of this: what is shown is the order of work and the calls that are made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transfer.standin_npu import INDEX, StandinNpu, needs_compiler, standin
from transfer.traffic import Machine, Traffic

from kvoffload_patch.transfer.backends import direct as copy_direct
from kvoffload_patch.transfer.backends.acl import AclDriver
from kvoffload_patch.transfer.backends.base import CopyBackend
from kvoffload_patch.transfer.backends.choose import choose_backend
from kvoffload_patch.transfer.backends.direct import DirectBackend
from kvoffload_patch.transfer.backends.slots import SlotMemory
from kvoffload_patch.transfer.canary import run_canary
from kvoffload_patch.transfer.device import device_of
from kvoffload_patch.transfer.devices.npu import AclRegistrar, NpuDevice
from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.memory.host_buffer import HostBuffer

AHEAD = 8  # steps

pytestmark = needs_compiler
Use = Callable[..., StandinNpu]


@pytest.fixture
def use(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Use]:
    with ExitStack() as stack:
        folder = tmp_path_factory.getbasetemp()
        yield lambda **how: stack.enter_context(standin(folder, **how))


class NpuMachine(Machine):
    """A rank on the stand-in; its compute is done late, by a thread of the stand-in."""

    def __init__(self, npu: StandinNpu, seed: int, chunk: int) -> None:
        self.npu, self._slice, self.steps = npu, chunk, 0
        super().__init__("npu", "direct", seed)

    def _open(self, name: str, slots: SlotMemory) -> CopyBackend:
        nbytes = self._slice * self.layout.block_bytes
        with mock.patch.object(copy_direct, "STORE_SLICE_BYTES", nbytes):
            # The tensors of this test do not begin where those of an NPU do.
            driver = AclDriver(INDEX)
            driver.alignment = 1
            return DirectBackend(self.layout, slots, driver)

    def _compute(self, call: Callable[[], None]) -> None:
        self.npu.compute(call)

    def breathe(self) -> None:
        """The host is a few steps ahead at most: else steps without copies come up for ever."""
        self.steps += 1
        if self.steps % AHEAD == 0:
            self.npu.current.synchronize()


@pytest.mark.parametrize("old", [False, True], ids=["batches", "older CANN"])
@pytest.mark.parametrize("chance", [0.0, 0.2], ids=["all well", "copies fail"])
def test_every_loaded_byte_is_the_one_stored(use: Use, old: bool, chance: float) -> None:
    """Copies and compute are late; a step and the copy thread submit copies beside each other."""
    npu = use(old=old)
    npu.put(delay_us=200)
    machine = NpuMachine(npu, seed=3, chunk=2)
    try:
        machine.backend.chance = chance
        traffic = Traffic([machine], seed=5)
        traffic.run(600)
        assert traffic.loaded > 60
        assert bool(machine.failed) == bool(chance)
        assert npu.at_once == 1, "two threads submitted copies at the same time"
        assert (npu.batches == 0) == old
        assert bool(npu.plain) == old, "registered memory is copied without waiting"
    finally:
        machine.close()
    assert npu.library.standin_num_pinned() == 0


def test_refused_copies_are_recomputed(use: Use) -> None:
    """Whichever copy of a batch AscendCL refuses, no byte of it is taken for a stored one."""
    npu = use()
    npu.put(delay_us=100)
    machine = NpuMachine(npu, seed=1, chunk=2)
    try:
        traffic = Traffic([machine], seed=2)
        for count in range(12):
            npu.put(fail_in=count)
            traffic.run(traffic.moves + 60)
        assert machine.failed
    finally:
        machine.close()


def layout(num_blocks: int = 9, offset: int = 0) -> BlockLayout:
    """K and V apart, at multiples of 64 bytes from a page on, and from ``offset`` on."""
    tensors = []
    for _ in range(2):
        raw = torch.zeros(num_blocks * 256 + 4096 + offset, dtype=torch.uint8)
        begin = -raw.data_ptr() % 4096 + offset
        tensors.append(raw[begin : begin + num_blocks * 256].view(num_blocks, 256))
    return BlockLayout(tensors, num_blocks)


def test_the_backend_is_chosen_measured_and_proven(use: Use) -> None:
    npu = use()
    npu.put(delay_us=100)
    made = layout()
    host = HostBuffer(6, made.block_bytes, made.device)
    host.wait_ready(6)
    slots = SlotMemory(host.slots, host.slots_per_piece)
    chosen = choose_backend(made, slots, 6)
    assert chosen.backend.name == "direct" and chosen.report.startswith("copies direct (")
    assert npu.batches > 0 == npu.plain
    run_canary(made, chosen.backend, slot=5)
    host.close()


@pytest.mark.parametrize(
    ("choice", "integrity", "text"),
    [
        ("staged", "off", "expected KVOFFLOAD_COPY_BACKEND=auto or direct on cpu, found staged"),
        ("torch", "off", "expected KVOFFLOAD_COPY_BACKEND=auto or direct on cpu, found torch"),
        ("auto", "full", "no checksums on this device; set KVOFFLOAD_INTEGRITY=off"),
    ],
)
def test_what_it_cannot_do_is_refused(use: Use, choice: str, integrity: str, text: str) -> None:
    use()
    slots = SlotMemory(torch.zeros(6, 512, dtype=torch.uint8))
    with pytest.raises(TransferError, match=text):
        choose_backend(layout(), slots, 6, choice, integrity)


def test_rows_where_the_driver_cannot_copy_are_refused(use: Use) -> None:
    use()
    slots = SlotMemory(torch.zeros(4096 * 2, dtype=torch.uint8)[:512].view(1, 512))
    with pytest.raises(TransferError, match="at multiples of 64 bytes, found others"):
        DirectBackend(layout(offset=32), slots, AclDriver(INDEX))


@pytest.mark.parametrize(
    ("kernel", "old", "pins"),
    [
        ("5.15.0-91-generic", False, True),
        ("6.1", False, True),
        ("5.10.0-60.18.0.50.oe2203", False, False),
        ("4.19.90", False, False),
        ("6.1", True, False),
    ],
)
def test_memory_is_registered_where_that_is_safe(
    use: Use, kernel: str, old: bool, pins: bool
) -> None:
    npu = use(old=old)
    registrar = AclRegistrar(INDEX, kernel)
    registrar.enter()
    assert {device for _, device in npu.used} == {INDEX}
    memory = ctypes.create_string_buffer(8192)
    page = -(-ctypes.addressof(memory) // 4096) * 4096
    assert registrar.register(page, 4096) == 0
    assert npu.library.standin_num_pinned() == int(pins)
    assert registrar.unregister(page) == 0
    assert npu.library.standin_num_pinned() == 0
    if pins:
        assert registrar.register(page + 8, 64) == 107000


def test_streams_have_no_priority_and_their_handles_come_last() -> None:
    on: Any = SimpleNamespace(type="npu", index=2)  # torch has that name with torch_npu only
    device: Any = device_of(on)
    assert isinstance(device, NpuDevice) and not device.is_host and not device.shares_memory()
    npu = mock.MagicMock()
    with mock.patch.object(torch, "npu", npu, create=True):
        device.new_stream(-1)
    npu.Stream.assert_called_once_with(device=on)
    assert device.handle(SimpleNamespace(npu_stream=77)) == 77
