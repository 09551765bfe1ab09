"""`StagedBackend`: streams, slices, calls of the driver; `test_backends` compares the bytes."""

from __future__ import annotations

import pytest
import torch
from transfer.opened import POISON, Open, round_trip

from kvoffload_patch.transfer.errors import TransferError


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
@pytest.mark.parametrize("seed", range(8))
def test_copies_go_behind_what_their_streams_have_been_given(opened: Open, seed: int) -> None:
    """Slots behind the stream of the bus, blocks behind that of the blocks."""
    setup = opened("kv_outermost", "staged", "cpu", chunk=1, seed=seed)
    assert setup.streams is not None
    slots, rows, seen = setup.slots.slots, setup.layout.rows, []
    bus, blocks = setup.streams.bus, setup.streams.blocks
    bus.append(lambda: seen.append(slots[2:5].clone()))
    blocks.append(lambda: [row[1:4].fill_(7) for row in rows])
    setup.store([1, 2, 3], [2, 3, 4])
    setup.wait()
    assert bool((seen.pop() == POISON).all())
    assert bool((slots[2:5] == 7).all())
    bus.append(lambda: slots[2:5].fill_(9))
    blocks.append(lambda: seen.extend(row[1:4].clone() for row in rows))
    setup.load([1, 2, 3], [2, 3, 4])
    setup.wait()
    assert all(bool((row == 7).all()) for row in seen)
    assert all(bool((row[1:4] == 9).all()) for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
@pytest.mark.parametrize("fail_in", range(6))
@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_refused_copy_is_raised_and_later_ones_are_right(
    opened: Open, direction: str, fail_in: int
) -> None:
    for seed in range(5):
        setup = opened("different_dtypes", "staged", "cpu", chunk=2, seed=seed)
        source, slots = [*range(6)], [0, 2, 4, 6, 8, 10]
        setup.store(source, slots)
        setup.wait()
        setup.driver.fail_in = fail_in
        with pytest.raises(TransferError, match="as the test asked"):
            getattr(setup, direction)(source, slots)
        round_trip(setup, [6, 5, 1], [1, 3, 4], [0, 4, 2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
@pytest.mark.parametrize(
    ("slots", "copies"),
    [([0, 1, 2, 3], 1), ([0, 2, 4, 6], 4), ([0, 1, 4, 6], 3), ([6, 4, 1, 0], 3)],
)
def test_neighbours_are_merged_and_the_rest_goes_to_the_driver_in_one_call(
    opened: Open, slots: list[int], copies: int
) -> None:
    setup = opened("k_and_v_apart", "staged", "cpu", chunk=4)
    setup.store([0, 1, 2, 3], slots)
    setup.load([0, 1, 2, 3], slots)
    assert setup.driver.calls == [copies, copies]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
@pytest.mark.parametrize(("blocks", "whole"), [(2, 0), (3, 0), (4, 1), (5, 2), (6, 3)])
def test_the_first_group_is_there_when_as_few_blocks_as_can_be_have_crossed_whole(
    opened: Open, blocks: int, whole: int
) -> None:
    setup = opened("kv_outermost", "groups", "cpu", chunk=1)  # three are made ready together
    ends = [*setup.layout.offsets, setup.layout.block_bytes]
    first_group = ends[setup.backend.groups[0][1]]
    crossed: list[int] = []
    enqueue = setup.driver._enqueue

    def noted(target: int, source: int, nbytes: int, stream: int) -> None:
        crossed.append(nbytes)
        enqueue(target, source, nbytes, stream)

    setup.driver._enqueue = noted
    assert setup.cuda is not None
    with setup.cuda:
        slices = setup.backend.load([*range(blocks)], [*range(blocks)], streams=setup.streams)
        assert next(there for there in slices if there) == 1
        so_far = sum(crossed)
        assert {*slices} <= {*range(1, len(setup.backend.groups))}
    setup.wait()
    assert so_far == whole * setup.layout.block_bytes + (blocks - whole) * first_group


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
def test_a_group_is_there_with_its_last_slice(opened: Open) -> None:
    setup = opened("kv_outermost", "groups", "cpu", chunk=1, ready=7)  # four in a slice of a group
    assert setup.cuda is not None
    with setup.cuda:
        slices = setup.backend.load([*range(7)], [*range(7)], streams=setup.streams)
        assert [*slices] == [0, 1, 1]  # and all at its end
    setup.wait()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
@pytest.mark.parametrize("name", ["staged", "groups"])
def test_loads_of_several_slices_are_timed(opened: Open, name: str) -> None:
    setup = opened("kv_outermost", name, "cpu", chunk=1)
    times = setup.backend.load_times
    assert times is not None
    numbers = [*range(setup.layout.num_blocks)]
    setup.store(numbers, numbers)
    assert not times.ms_per_byte()
    setup.load(numbers, numbers)
    assert not times.ms_per_byte(), "it is under way"
    setup.wait()
    assert times.ms_per_byte() > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
@pytest.mark.parametrize("name", ["staged", "groups"])
def test_loads_are_timed_by_the_bytes_that_cross(
    opened: Open, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = opened("kv_outermost", name, "cpu", chunk=1)
    told: list[object] = []
    times = setup.backend.load_times
    monkeypatch.setattr(times, "begin", lambda: told.append("begins"))
    monkeypatch.setattr(times, "crossed", lambda nbytes, bus: told.append(nbytes))
    monkeypatch.setattr(times, "end", lambda bus: told.append("ends"))
    setup.load([*range(7)], [*range(7)])
    setup.wait()
    (first, *crossed, last) = told
    assert (first, last) == ("begins", "ends")
    assert sum(nbytes for nbytes in crossed if isinstance(nbytes, int)) == 7 * setup.slots.pitch
