"""`TorchBackend` moves the bytes of the blocks it is given, and no other byte on either side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transfer.layouts import DEVICES, DTYPES, LAYOUTS, Case, build, equal

from kvoffload_patch.transfer import copy_torch
from kvoffload_patch.transfer.copy_torch import TorchBackend
from kvoffload_patch.transfer.host_buffer import HostBuffer
from kvoffload_patch.transfer.layout import BlockLayout

NUM_SLOTS = 12
POISON = 0xA5


class Staged(TorchBackend):
    """The way of devices, through staging memory, in the memory of the CPU."""

    def __init__(self, layout: BlockLayout, slots: torch.Tensor, chunk: int) -> None:
        super().__init__(layout, slots)
        self._direct = False
        self._chunk = chunk
        self._stage_store = self._new_staging(layout)
        self._stage_load = self._new_staging(layout)


class Setup:
    """A layout, its slots full of poison, and a backend between them."""

    def __init__(self, case: Case, chunk: int | None = None) -> None:
        self.case = case
        self.layout = case.layout()
        self.host = HostBuffer(NUM_SLOTS, self.layout.block_bytes, self.layout.device)
        self.slots = self.host.slots
        self.slots.fill_(POISON)
        self.backend: TorchBackend = TorchBackend(self.layout, self.slots)
        if chunk is not None:
            self.backend = Staged(self.layout, self.slots, chunk)

    def wait(self) -> None:
        if self.layout.device.type == "cuda":
            torch.cuda.synchronize()

    def poison(self, blocks: list[int]) -> None:
        for block in blocks:
            for view in self.case.views(block):
                view.copy_(torch.full_like(view.view(torch.uint8), POISON).view(view.dtype))


def round_trip(setup: Setup, source: list[int], slots: list[int], target: list[int]) -> None:
    """Store blocks, load them into other blocks, and compare all memory there is."""
    case = setup.case
    before = [raw.clone() for raw in case.storages()]
    stored = {block: case.content(block) for block in source}

    setup.backend.store(source, slots)
    setup.wait()
    assert equal(case.storages(), before), "a store changed KV tensors"
    for slot in range(NUM_SLOTS):
        row = setup.slots[slot]
        if slot in slots:
            block = source[slots.index(slot)]
            parts = [row_of[block].cpu() for row_of in setup.layout.rows]
            assert torch.equal(row, torch.cat(parts))
        else:
            assert bool((row == POISON).all()), "a store changed a slot it was not given"

    filled = setup.slots.clone()
    setup.poison(source + target)
    rest = case.untouched(target)
    setup.backend.load(target, slots)
    setup.wait()
    assert torch.equal(setup.slots, filled), "a load changed slots"
    assert [case.content(block) for block in target] == [stored[block] for block in source]
    assert equal(case.untouched(target), rest), "a load changed bytes beside its blocks"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_come_back_as_they_were_and_nothing_else_changes(
    name: str, dtype: torch.dtype, device: str
) -> None:
    round_trip(Setup(build(name, dtype, device=device)), [5, 0, 3], [8, 2, 3], [1, 6, 2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("source", "slots", "target"),
    [
        ([], [], []),
        ([6], [11], [6]),
        ([0], [0], [5]),
        ([0, 1, 2], [4, 5, 6], [4, 5, 6]),
        ([0, 1, 2], [6, 5, 4], [2, 1, 0]),
        ([4, 2, 0, 6, 1, 3, 5], [0, 1, 2, 9, 10, 5, 6], [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_any_order_and_number_of_blocks(
    source: list[int], slots: list[int], target: list[int], device: str
) -> None:
    round_trip(Setup(build("kv_outermost", device=device)), source, slots, target)


@pytest.mark.parametrize("chunk", [1, 2, 3, 64])
@pytest.mark.parametrize("name", LAYOUTS)
def test_staging_memory_of_any_size_moves_the_same_bytes(name: str, chunk: int) -> None:
    setup = Setup(build(name), chunk)
    round_trip(setup, [4, 2, 0, 6, 1], [0, 1, 2, 9, 10], [5, 3, 1, 0, 2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("blocks", [0, 1, 2, 3])
def test_batches_larger_than_the_staging_memory_move_whole(blocks: int, monkeypatch: Any) -> None:
    case = build("layers_within_blocks", device="cuda")
    monkeypatch.setattr(copy_torch, "STAGING_BYTES", blocks * case.layout().block_bytes)
    round_trip(Setup(case), [4, 2, 0, 6, 1], [0, 1, 2, 9, 10], [5, 3, 1, 0, 2])


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_stored_again_replaces_what_was_there(device: str) -> None:
    setup = Setup(build("different_dtypes", device=device))
    wanted = setup.case.content(4)
    setup.backend.store([1, 2], [7, 8])
    setup.backend.store([4], [7])
    setup.backend.load([0], [7])
    setup.wait()
    assert setup.case.content(0) == wanted


def test_neighbouring_slots_are_one_run() -> None:
    assert list(copy_torch._runs([4, 5, 6, 9, 8, 2, 3])) == [
        (0, 4, 3),
        (3, 9, 1),
        (4, 8, 1),
        (5, 2, 2),
    ]
    assert list(copy_torch._runs([])) == []
