"""`BlockLayout` against addresses computed from strides: all bytes of a block and no others."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from transfer.layouts import DTYPES, LAYOUTS, SIZES, Sizes, addresses_of, as_bytes, build

from kvoffload_patch.transfer.errors import LayoutRefused, TransferError
from kvoffload_patch.transfer.layout import BlockLayout, layout_by_bytes

Refused = Callable[[], BlockLayout]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_rows_of_a_block_are_its_bytes_and_no_others(
    name: str, dtype: torch.dtype, sizes: Sizes
) -> None:
    case = build(name, dtype, sizes)
    layout = case.layout()
    seen: set[int] = set()
    for block in range(case.num_blocks):
        wanted = {a for view in case.views(block) for a in addresses_of(view)}
        found = [a for row in layout.rows for a in addresses_of(row[block])]
        assert len(found) == len(set(found)) == layout.block_bytes, "a byte is in two rows"
        assert set(found) == wanted
        assert not seen.intersection(found), "a byte belongs to two blocks"
        seen.update(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_block_views_show_what_the_tensors_hold(name: str, dtype: torch.dtype) -> None:
    case = build(name, dtype)
    layout = case.layout()
    for block in range(case.num_blocks):
        views = layout.block_views(block)
        assert [view.dtype for view in views] == [tensor.dtype for tensor in case.tensors]
        assert [as_bytes(view) for view in views] == case.content(block)
        wanted = [addresses_of(view) for view in case.views(block)]
        assert [addresses_of(view) for view in views] == wanted


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_lie_side_by_side_in_a_slot(name: str) -> None:
    case = build(name)
    layout = case.layout()
    at = 0
    for offset, row in zip(layout.offsets, layout.rows):
        assert offset == at
        assert row.dtype == torch.uint8
        assert row.shape[0] == case.num_blocks
        assert row.stride(1) == 1
        at += row.shape[1]
    assert layout.block_bytes == at
    assert len(layout.offsets) == len(layout.rows)
    assert layout.num_blocks == case.num_blocks
    assert layout.device.type == "cpu"


def slot_bytes(layout: BlockLayout, block: int) -> dict[int, int]:
    """Where each address of a block is in its slot, from the rows alone."""
    found: dict[int, int] = {}
    for offset, row in zip(layout.offsets, layout.rows):
        found.update({a: offset + i for i, a in enumerate(addresses_of(row[block]))})
    return found


def test_the_group_of_a_tensor_whose_rows_are_given_out_of_order() -> None:
    heads_and_kv = torch.zeros(3, 2, 4, 8, dtype=torch.uint8).transpose(0, 1)
    layout = BlockLayout([torch.zeros(4, 6), heads_and_kv], 4)
    assert layout.group_of_tensor(1, layout.cut(99, 1)) == 6


CUTS = [(1, 1), (2, 1), (3, 1), (4, 100), (100, 1), (5, 200), (7, 1 << 20)]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_groups_are_whole_rows_in_order_and_large_enough(name: str, cut: tuple[int, int]) -> None:
    layout = build(name).layout()
    groups = layout.cut(*cut)
    rows = [row for first, end in groups for row in range(first, end)]
    assert rows == list(range(len(layout.rows)))
    sizes = [sum(layout.rows[r].shape[1] for r in range(*group)) for group in groups]
    assert len(groups) <= cut[0]
    assert len(groups) == 1 or min(sizes) >= cut[1]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tensor_has_no_byte_after_its_group_and_some_in_it(
    name: str, cut: tuple[int, int]
) -> None:
    case = build(name)
    layout = case.layout()
    groups = layout.cut(*cut)
    place = slot_bytes(layout, 1)
    ends = [layout.offsets[end - 1] + layout.rows[end - 1].shape[1] for _, end in groups]
    for index, view in enumerate(case.views(1)):
        last = max(place[a] for a in addresses_of(view))
        wanted = next(g for g, end in enumerate(ends) if last < end)
        assert layout.group_of_tensor(index, groups) == wanted


@pytest.mark.parametrize(
    ("rows", "cut", "sizes"),
    [
        ([10] * 64, (6, 1), [110, 110, 110, 110, 100, 100]),
        ([10] * 64, (64, 1), [10] * 64),
        ([10] * 64, (100, 1), [10] * 64),
        ([10] * 64, (100, 15), [20] * 32),
        ([10] * 5, (2, 1), [30, 20]),
        ([10] * 5, (3, 20), [30, 20]),
        ([30, 25, 10], (3, 20), [30, 35]),
        ([10] * 5, (9, 51), [50]),
        ([1, 1, 30, 1, 1], (3, 1), [32, 1, 1]),
        ([30, 1, 1, 1, 1], (3, 2), [30, 2, 2]),
    ],
)
def test_groups_are_of_nearly_equal_size(
    rows: list[int], cut: tuple[int, int], sizes: list[int]
) -> None:
    layout = BlockLayout([torch.zeros(4, size, dtype=torch.uint8) for size in rows], 4, 0)
    groups = layout.cut(*cut)
    assert [sum(rows[first:end]) for first, end in groups] == sizes
    assert [layout.group_of_tensor(t, groups) for t in range(len(rows))] == [
        g for g, (first, end) in enumerate(groups) for _ in range(first, end)
    ]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("kv_outermost", 2),
        ("blocks_outermost", 1),
        ("layers_outermost_in_one_allocation", 8),
        ("layers_within_blocks", 1),
        ("some_layers_within_blocks", 2),
        ("heads_outermost_seen_as_blocks_first", 3),
        ("one_tensor_twice", 2),
        ("one_allocation_seen_in_two_ways", 1),
        ("different_dtypes_within_blocks", 1),
    ],
)
def test_bytes_that_touch_within_a_block_are_one_row(name: str, rows: int) -> None:
    assert len(build(name).layout().rows) == rows


@pytest.mark.parametrize("dim", [0, 1])
def test_a_known_block_dimension_settles_what_sizes_leave_open(dim: int) -> None:
    tensor = torch.arange(4 * 4 * 6, dtype=torch.int16).view(4, 4, 6)
    with pytest.raises(LayoutRefused, match="found 2"):
        BlockLayout([tensor], 4)
    layout = BlockLayout([tensor], 4, block_dim=dim)
    for block in range(4):
        wanted = set(addresses_of(tensor.select(dim, block)))
        assert {a for row in layout.rows for a in addresses_of(row[block])} == wanted


def test_a_known_block_dimension_may_count_kernel_blocks() -> None:
    layout = BlockLayout([torch.zeros(8, 4, 2, dtype=torch.uint8)], 4, block_dim=0)
    assert layout.block_bytes == 16
    assert layout.block_views(3)[0].shape == (2, 4, 2)


def test_a_single_block_is_understood() -> None:
    tensor = torch.zeros(1, 5, 3)
    layout = BlockLayout([tensor], 1, block_dim=0)
    found = [a for row in layout.rows for a in addresses_of(row[0])]
    assert sorted(found) == sorted(addresses_of(tensor))


def test_tensors_of_separate_allocations_are_kept_apart() -> None:
    tensors = [torch.full((3, 4), value, dtype=torch.uint8) for value in (1, 2)]
    layout = BlockLayout(tensors, 3)
    assert sorted(row[0].tolist() for row in layout.rows) == [[1] * 4, [2] * 4]


def strided(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, storage: int = 4096
) -> torch.Tensor:
    return torch.zeros(storage, dtype=torch.uint8).as_strided(shape, strides, offset)


OVERLAP = "so blocks overlap|share bytes"

REFUSALS: dict[str, tuple[Refused, str]] = {
    "no tensors": (lambda: BlockLayout([], 4), "found none"),
    "no dimension counts blocks": (
        lambda: BlockLayout([torch.zeros(3, 5, 2)], 7),
        "expected one dimension that counts blocks, found 0",
    ),
    "two dimensions could count blocks": (
        lambda: BlockLayout([torch.zeros(7, 7, 2)], 7),
        "expected one dimension that counts blocks, found 2",
    ),
    "two dimensions could count kernel blocks": (
        lambda: BlockLayout([torch.zeros(14, 21, 2)], 7),
        "expected one dimension that counts blocks, found 2",
    ),
    "as many tokens in a block as there are blocks, split into kernel blocks": (
        lambda: BlockLayout([torch.zeros(14, 7, 3, 4)], 7),
        "expected one dimension that counts blocks, found 2",
    ),
    "a head size equal to the number of blocks, split into kernel blocks": (
        lambda: BlockLayout([torch.zeros(16, 5, 3, 8)], 8),
        "expected one dimension that counts blocks, found 2",
    ),
    "an empty tensor": (lambda: BlockLayout([torch.zeros(0, 5)], 7), "found 0"),
    "the known dimension has another size": (
        lambda: BlockLayout([torch.zeros(6, 7)], 7, block_dim=0),
        "expected dimension 0 to count blocks",
    ),
    "the known dimension is not there": (
        lambda: BlockLayout([torch.zeros(7, 2)], 7, block_dim=2),
        "expected dimension 2 to count blocks",
    ),
    "the known dimension is empty": (
        lambda: BlockLayout([torch.zeros(0, 2)], 7, block_dim=0),
        "expected dimension 0 to count blocks",
    ),
    "one tensor of two is not understood": (
        lambda: BlockLayout([torch.zeros(7, 2), torch.zeros(6, 2)], 7),
        "found 0",
    ),
    "gaps between bytes": (
        lambda: BlockLayout([strided((7, 5), (20, 2))], 7),
        "gaps or overlap",
    ),
    "gaps between tokens": (
        lambda: BlockLayout([strided((7, 5, 3), (40, 4, 1))], 7),
        "gaps or overlap",
    ),
    "tokens overlap": (
        lambda: BlockLayout([strided((7, 5, 4), (40, 2, 1))], 7),
        "gaps or overlap",
    ),
    "tokens are all the same": (
        lambda: BlockLayout([torch.zeros(7, 1, 3).expand(7, 5, 3)], 7),
        "gaps or overlap",
    ),
    "blocks are all the same": (
        lambda: BlockLayout([torch.zeros(1, 5).expand(7, 5)], 7),
        OVERLAP,
    ),
    "blocks overlap": (lambda: BlockLayout([strided((7, 9), (6, 1))], 7), OVERLAP),
    "kernel blocks apart": (
        lambda: BlockLayout([strided((14, 5), (8, 1))], 7),
        "the kernel blocks of a block are apart",
    ),
    "K and V overlap by a block": (
        lambda: BlockLayout([strided((2, 7, 5), (30, 5, 1))], 7),
        OVERLAP,
    ),
    "segments on top of each other": (
        lambda: BlockLayout([strided((2, 2, 7, 4), (40, 40, 4, 1))], 7),
        "segments overlap",
    ),
    "rows share bytes": (
        lambda: BlockLayout(shared_rows(), 7),
        "rows of different KV tensors share bytes",
    ),
    "blocks of different lengths share bytes": (
        lambda: BlockLayout(shared_lengths(), 7),
        "rows of different KV tensors share bytes",
    ),
    "blocks at different distances share bytes": (
        lambda: BlockLayout(different_distances(), 7),
        "rows of different KV tensors share bytes",
    ),
    "one block's bytes are another's": (
        lambda: BlockLayout(shifted_by_a_block(), 7),
        OVERLAP,
    ),
}


def shared_rows() -> list[torch.Tensor]:
    memory = torch.zeros(4096, dtype=torch.uint8)
    return [memory.as_strided((7, 6), (10, 1), 0), memory.as_strided((7, 4), (10, 1), 8)]


def shared_lengths() -> list[torch.Tensor]:
    memory = torch.zeros(4096, dtype=torch.uint8)
    return [memory.as_strided((7, 10), (10, 1), 0), memory.as_strided((7, 20), (20, 1), 20)]


def different_distances() -> list[torch.Tensor]:
    """The first blocks lie side by side; the second one of the second is that of the first."""
    memory = torch.zeros(4096, dtype=torch.uint8)
    return [memory.as_strided((7, 6), (20, 1), 0), memory.as_strided((7, 4), (12, 1), 8)]


def shifted_by_a_block() -> list[torch.Tensor]:
    memory = torch.zeros(4096, dtype=torch.uint8)
    return [memory.as_strided((7, 10), (10, 1), 0), memory.as_strided((7, 10), (10, 1), 10)]


@pytest.mark.parametrize("why", REFUSALS)
def test_what_is_not_understood_is_refused_in_one_sentence(why: str) -> None:
    build_it, message = REFUSALS[why]
    with pytest.raises(LayoutRefused, match=message) as refusal:
        build_it()
    text = str(refusal.value)
    assert text.startswith("KV layout not understood: ")
    assert text.endswith(".")
    assert not re.search(r"\.\s|\n", text), "more than one sentence"
    assert isinstance(refusal.value, TransferError)


def test_blocks_beyond_their_storage_are_refused() -> None:
    tensor = strided((7, 5), (5, 1), storage=35)
    assert BlockLayout([tensor], 7).block_bytes == 5
    tensor.untyped_storage().resize_(34)
    with pytest.raises(LayoutRefused, match="its blocks reach beyond its storage"):
        BlockLayout([tensor], 7)


def test_a_refusal_names_shape_strides_and_blocks() -> None:
    with pytest.raises(LayoutRefused) as refusal:
        BlockLayout([torch.zeros(3, 5)], 7)
    assert "shape (3, 5), strides (5, 1), 7 blocks" in str(refusal.value)


# As kvcached makes them, of one allocation for two layers: each block with all layers, K and V of a
# block apart, blocks of two kernel blocks, and one tensor for K and V together.
ELASTIC = {
    "contiguous": [
        torch.zeros(50, 2, 2, 4, 3, 5)[:, layer].permute(1, 0, 2, 3, 4) for layer in range(2)
    ],
    "K and V apart": [torch.zeros(2 * 50, 4, 3, 5).view(2, 50, 4, 3, 5) for _ in range(2)],
    "kernel blocks": [torch.zeros(100, 2, 2, 3, 5) for _ in range(2)],
    "latents": [torch.zeros(50, 4, 30) for _ in range(2)],
}


@pytest.mark.parametrize("name", ELASTIC)
def test_tensors_with_more_blocks_than_are_known_are_laid_out_by_their_bytes(name: str) -> None:
    tensors = ELASTIC[name]
    layout = layout_by_bytes(tensors, nbytes=480, num_backed=3)
    assert (layout.num_blocks, layout.num_backed, layout.block_bytes) == (50, 3, 960)
    known = BlockLayout(tensors, 50)
    assert [row.shape for row in layout.rows] == [row.shape for row in known.rows]
    pairs = zip(layout.rows, known.rows)
    assert all(a.data_ptr() == b.data_ptr() and a.stride() == b.stride() for a, b in pairs)
    for block in (0, 49):
        views = [view.shape for view in layout.block_views(block)]
        assert views == [view.shape for view in known.block_views(block)]


def test_bytes_of_which_the_last_block_would_have_fewer_are_refused() -> None:
    """Eight entries in blocks of three: not two blocks of four."""
    with pytest.raises(LayoutRefused, match="blocks of 60 bytes, found 1"):
        layout_by_bytes([torch.zeros(8, 5)], 60, 1)


@pytest.mark.parametrize(("nbytes", "found"), [(472, 0), (6000, 2)])
def test_bytes_that_no_dimension_or_several_could_count_are_refused(
    nbytes: int, found: int
) -> None:
    with pytest.raises(LayoutRefused, match=f"blocks of {nbytes} bytes, found {found}"):
        layout_by_bytes([torch.zeros(50, 2, 50, 15)], nbytes, 1)
