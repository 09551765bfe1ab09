"""`DirectBackend` alone: its place between the streams, its calls, and what it refuses."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transfer.fake_cuda import FakeCopier
from transfer.opened import Open

from kvoffload_patch.transfer.backends.direct import DirectBackend
from kvoffload_patch.transfer.errors import TransferError


@pytest.mark.parametrize("seed", range(8))
def test_a_load_is_behind_what_the_bus_has(opened: Open, seed: int) -> None:
    setup = opened("kv_outermost", "direct", "cpu", torch.uint8, seed=seed)
    assert setup.streams is not None
    # What another link brings to the slot arrives late.
    setup.streams.bus.append(partial(setup.slots.slots[2].fill_, 77))
    setup.load([4], [2])
    setup.wait_for_end("load")
    assert (setup.wanted(4) == 77).all()


@pytest.mark.parametrize("seed", range(8))
def test_what_the_bus_has_after_a_store_is_behind_it(opened: Open, seed: int) -> None:
    setup = opened("kv_outermost", "direct", "cpu", torch.uint8, seed=seed)
    assert setup.streams is not None
    for view in setup.case.views(4):
        view.fill_(33)
    seen: list[torch.Tensor] = []
    setup.store([4], [2])
    setup.streams.bus.append(lambda: seen.append(setup.slots.slots[2].clone()))
    setup.wait()
    assert (seen[0] == 33).all()


def test_a_slice_is_one_call_with_every_row_of_its_blocks(opened: Open) -> None:
    setup = opened("kv_outermost", "direct", "cpu", chunk=3)
    assert setup.store([*range(7)], [*range(7)]) == 3
    rows = len(setup.layout.rows)
    assert rows > 1
    assert setup.driver.calls == [3 * rows, 3 * rows, rows]


def test_no_copy_is_submitted_after_one_that_is_refused(opened: Open) -> None:
    setup = opened("kv_outermost", "direct", "cpu", chunk=2)
    setup.driver.fail_in = 3 * len(setup.layout.rows)  # in the second slice
    with pytest.raises(TransferError, match="refused a copy"):
        setup.store([*range(7)], [*range(7)])
    assert len(setup.driver.calls) == 2


def test_rows_and_slots_begin_where_the_driver_can_copy(opened: Open) -> None:
    setup = opened("kv_outermost", "direct", "cpu", torch.uint8)

    class Picky(FakeCopier):
        alignment = 1 << 20

    assert setup.cuda is not None
    with setup.cuda, pytest.raises(TransferError, match="at multiples of 1048576 bytes"):
        DirectBackend(setup.layout, setup.slots, Picky(setup.cuda, setup.slots))
