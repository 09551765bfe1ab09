"""The canary passes where bytes are right, leaves no trace, and fails where one byte is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from transfer.layouts import DEVICES, DTYPES, LAYOUTS, build, equal

from kvoffload_patch.transfer.backends.base import Slices
from kvoffload_patch.transfer.backends.slots import SlotMemory
from kvoffload_patch.transfer.backends.torch import TorchBackend
from kvoffload_patch.transfer.canary import run_canary
from kvoffload_patch.transfer.errors import CanaryFailed, TransferError
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.memory.host_buffer import HostBuffer

Ids = Sequence[int]


def backend_for(layout: BlockLayout, kind: type[TorchBackend] = TorchBackend) -> TorchBackend:
    host = HostBuffer(3, layout.block_bytes, layout.device)
    return kind(layout, SlotMemory(host.slots, host.slots_per_piece))


class Spoiled(TorchBackend):
    """Each way is a function of the right one."""

    def store(self, gpu_block_ids: Ids, cpu_slots: Ids, *_: object) -> Slices:
        yield from self.spoiled_store(gpu_block_ids, cpu_slots)

    def load(self, gpu_block_ids: Ids, cpu_slots: Ids, *_: object, **__: object) -> Slices:
        yield from self.spoiled_load(gpu_block_ids, cpu_slots)

    def spoiled_store(self, gpu_block_ids: Ids, cpu_slots: Ids) -> Slices:
        return super().store(gpu_block_ids, cpu_slots)

    def spoiled_load(self, gpu_block_ids: Ids, cpu_slots: Ids) -> Slices:
        return super().load(gpu_block_ids, cpu_slots)


class CorruptsStores(Spoiled):
    def spoiled_store(self, gpu_block_ids: Ids, cpu_slots: Ids) -> Slices:
        yield from super().spoiled_store(gpu_block_ids, cpu_slots)
        self._slots[cpu_slots[0], -1] ^= 1


class CorruptsLoads(Spoiled):
    def spoiled_load(self, gpu_block_ids: Ids, cpu_slots: Ids) -> Slices:
        yield from super().spoiled_load(gpu_block_ids, cpu_slots)
        self._rows[0][gpu_block_ids[0], 0] ^= 0x80


class SkipsARowOfStores(Spoiled):
    def spoiled_store(self, gpu_block_ids: Ids, cpu_slots: Ids) -> Slices:
        rows, self._rows = self._rows, self._rows[:-1]
        yield from super().spoiled_store(gpu_block_ids, cpu_slots)
        self._rows = rows


class SkipsARowOfLoads(Spoiled):
    def spoiled_load(self, gpu_block_ids: Ids, cpu_slots: Ids) -> Slices:
        rows, self._rows = self._rows, self._rows[:-1]
        yield from super().spoiled_load(gpu_block_ids, cpu_slots)
        self._rows = rows


class DoesNothing(Spoiled):
    def spoiled_store(self, gpu_block_ids: Ids, cpu_slots: Ids) -> Slices:
        yield 0

    def spoiled_load(self, gpu_block_ids: Ids, cpu_slots: Ids) -> Slices:
        yield 0


class LoadsTheNeighbourSlot(Spoiled):
    def spoiled_load(self, gpu_block_ids: Ids, cpu_slots: Ids) -> Slices:
        return super().spoiled_load(gpu_block_ids, [slot - 1 for slot in cpu_slots])


class WritesTheNeighbourBlock(Spoiled):
    def spoiled_load(self, gpu_block_ids: Ids, cpu_slots: Ids) -> Slices:
        yield from super().spoiled_load(gpu_block_ids, cpu_slots)
        yield from super().spoiled_load([block - 1 for block in gpu_block_ids], cpu_slots)


class SpillsAByteIntoTheNeighbourBlock(Spoiled):
    def spoiled_load(self, gpu_block_ids: Ids, cpu_slots: Ids) -> Slices:
        yield from super().spoiled_load(gpu_block_ids, cpu_slots)
        self._rows[-1][gpu_block_ids[0] - 1, -1] ^= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_passes_on_a_good_layout_and_leaves_every_byte_as_it_was(
    name: str, dtype: torch.dtype, device: str
) -> None:
    case = build(name, dtype, device=device)
    before = [raw.clone() for raw in case.storages()]
    layout = case.layout()
    run_canary(layout, backend_for(layout), slot=2)
    assert equal(case.storages(), before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_fails_and_leaves_every_byte_as_it_was(name: str, device: str) -> None:
    case = build(name, device=device)
    before = [raw.clone() for raw in case.storages()]
    layout = case.layout()
    with pytest.raises(CanaryFailed, match="has other bytes"):
        run_canary(layout, backend_for(layout, CorruptsStores), slot=0)
    assert equal(case.storages(), before)


@pytest.mark.parametrize("name", ["kv_outermost", "layers_within_blocks", "different_dtypes"])
@pytest.mark.parametrize(
    "kind",
    [
        CorruptsStores,
        CorruptsLoads,
        SkipsARowOfStores,
        SkipsARowOfLoads,
        DoesNothing,
        LoadsTheNeighbourSlot,
    ],
)
def test_wrong_bytes_are_found_and_the_block_is_as_it_was(
    kind: type[TorchBackend], name: str
) -> None:
    case = build(name)
    before = [raw.clone() for raw in case.storages()]
    layout = case.layout()
    with pytest.raises(CanaryFailed, match="has other bytes"):
        run_canary(layout, backend_for(layout, kind), slot=1)
    assert equal(case.storages(), before)


@pytest.mark.parametrize("kind", [WritesTheNeighbourBlock, SpillsAByteIntoTheNeighbourBlock])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_load_that_changes_the_neighbour_block_is_found(
    kind: type[TorchBackend], name: str
) -> None:
    layout = build(name).layout()
    with pytest.raises(CanaryFailed, match="changed another block"):
        run_canary(layout, backend_for(layout, kind), slot=1)


def without_a_row(layout: BlockLayout) -> None:
    layout.block_bytes -= layout.rows.pop().shape[1]
    layout.offsets.pop()


def one_byte_short(layout: BlockLayout) -> None:
    layout.rows[-1] = layout.rows[-1][:, :-1]


def one_block_off(layout: BlockLayout) -> None:
    layout.rows[0] = layout.rows[0].roll(1, 0)


@pytest.mark.parametrize("spoil", [without_a_row, one_byte_short, one_block_off])
def test_rows_that_miss_bytes_of_the_tensors_are_found(
    spoil: Callable[[BlockLayout], None],
) -> None:
    layout = build("kv_outermost").layout()
    spoil(layout)
    with pytest.raises(CanaryFailed, match="has other bytes"):
        run_canary(layout, backend_for(layout), slot=0)


def test_a_single_block_has_no_neighbour_to_compare() -> None:
    tensor = torch.arange(15, dtype=torch.float32).view(1, 5, 3)
    layout = BlockLayout([tensor], 1, block_dim=0)
    run_canary(layout, backend_for(layout), slot=0)
    assert tensor.flatten().tolist() == list(range(15))
    with pytest.raises(CanaryFailed):
        run_canary(layout, backend_for(layout, CorruptsStores), slot=0)


def test_random_numbers_of_others_do_not_depend_on_it() -> None:
    layout = build("kv_outermost").layout()
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    run_canary(layout, backend_for(layout), slot=0)
    assert torch.equal(torch.rand(3), wanted)


def test_a_failure_is_an_error_of_the_transfer() -> None:
    assert issubclass(CanaryFailed, TransferError)


def test_only_blocks_that_have_memory_are_tried() -> None:
    memory = torch.zeros(7 * 6, dtype=torch.uint8)
    layout = BlockLayout([memory.view(7, 6)], 7, num_backed=2)
    tried: list[int] = []

    class Noting(Spoiled):
        def spoiled_store(self, gpu_block_ids: Ids, cpu_slots: Ids) -> Slices:
            tried.extend(gpu_block_ids)
            return super().spoiled_store(gpu_block_ids, cpu_slots)

    run_canary(layout, backend_for(layout, Noting), slot=1)
    assert tried == [1]
    assert BlockLayout([memory.view(7, 6)], 7).num_backed == 7
