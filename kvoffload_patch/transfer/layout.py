"""Where the bytes of a KV block are: from tensors' shapes and strides, as opaque bytes.

A block is everything that all KV tensors hold for one block id. Its bytes lie in a few *rows*:
row tensors of ``uint8``, ``[num_blocks, nbytes]``, whose stride over blocks is what the KV
tensors have. What a byte means (K or V, head, token, dtype) does not matter here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from kvoffload_patch.transfer.errors import LayoutRefused

# The first of some neighbouring rows, and the one behind the last.
Rows = tuple[int, int]


@dataclass(frozen=True)
class _Span:
    """``nbytes`` of every block: block ``b`` starts at byte ``start + b * stride`` of a storage."""

    storage: int  # index of the storage
    stride: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class _BlockDim:
    """The dimension of a tensor that counts blocks; a block is ``split`` entries of it."""

    dim: int
    split: int


class BlockLayout:
    """The rows of all KV tensors of one rank.

    Args:
        tensors: the KV tensors, of any dtype and of one device, each with ``num_blocks`` blocks.
            Tensors that share bytes are taken once.
        num_blocks: number of KV blocks.
        block_dim: the dimension that counts blocks, in every tensor, where it is known; found
            by its size otherwise. Its size is ``num_blocks`` or, for backends that split a
            block into kernel blocks, a multiple of it.
        num_backed: blocks, from the first on, that have memory while nothing runs; None: all.

    Attributes:
        num_backed: as given; only these may be tried while nothing runs.
        rows: ``uint8`` views, each ``[num_blocks, nbytes]`` with unit stride over bytes.
        offsets: where each row starts in a slot of ``block_bytes``.
        block_bytes: bytes of one block on this rank.

    Raises:
        LayoutRefused: the shape or the strides of a tensor are not understood.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        num_blocks: int,
        block_dim: int | None = None,
        num_backed: int | None = None,
    ) -> None:
        if not tensors:
            raise LayoutRefused("expected KV tensors, found none")
        self.num_blocks = num_blocks
        self.num_backed = num_blocks if num_backed is None else min(num_blocks, num_backed)
        self.device = tensors[0].device
        self._tensors = list(tensors)
        self._dims = [_find_block_dim(t, num_blocks, block_dim) for t in tensors]
        storages: dict[int, tuple[int, torch.Tensor]] = {}
        spans: list[list[_Span]] = []  # of each tensor
        for tensor, dim in zip(tensors, self._dims):
            pointer = tensor.untyped_storage().data_ptr()
            index, _ = storages.setdefault(pointer, (len(storages), tensor))
            spans.append(_spans(tensor, dim, index, num_blocks))
        owners = {index: tensor for index, tensor in storages.values()}
        merged = _merge({s for of_tensor in spans for s in of_tensor}, num_blocks)
        self.rows = [_row(owners[s.storage], s, num_blocks) for s in merged]
        self.offsets: list[int] = []
        self.block_bytes = 0
        for row in self.rows:
            self.offsets.append(self.block_bytes)
            self.block_bytes += row.shape[1]
        self._last_row: list[int] = []  # of each tensor
        starts = [(m.storage, m.stride, m.start) for m in merged]  # in this order
        for of_tensor in spans:
            rows = [bisect_right(starts, (s.storage, s.stride, s.start)) - 1 for s in of_tensor]
            self._last_row.append(max(rows))

    def cut(self, most: int, min_bytes: int) -> list[Rows]:
        """Cut a block into groups of whole rows, in their order and of nearly equal size.

        Returns:
            ``most`` groups at most; if there are several, each has ``min_bytes`` or more.
        """
        left = max(1, min(most, self.block_bytes // max(1, min_bytes)))
        groups: list[Rows] = []
        first = begin = 0
        ends = [*self.offsets[1:], self.block_bytes]
        for row, end in enumerate(ends, 1):
            enough = max(min_bytes, -(-(self.block_bytes - begin) // left))
            if end - begin >= enough or row == len(ends):
                groups.append((first, row))
                first, begin, left = row, end, max(1, left - 1)
        if len(groups) > 1 and self.block_bytes - self.offsets[groups[-1][0]] < min_bytes:
            groups[-2:] = [(groups[-2][0], groups[-1][1])]
        return groups

    def group_of_tensor(self, index: int, groups: Sequence[Rows]) -> int:
        """The last of the groups of `cut` that has bytes of a tensor, by its place as given."""
        row = self._last_row[index]
        return next(at for at, (first, end) in enumerate(groups) if first <= row < end)

    def block_views(self, block_id: int) -> list[torch.Tensor]:
        """The part of every KV tensor that belongs to one block, in the tensor's own dtype.

        Taken from the tensors by index and not from the rows, so that a check of the rows
        against it (the canary) means something.
        """
        return [
            tensor.narrow(dim.dim, block_id * dim.split, dim.split)
            for tensor, dim in zip(self._tensors, self._dims)
        ]


def layout_by_bytes(tensors: Sequence[torch.Tensor], nbytes: int, num_backed: int) -> BlockLayout:
    """The layout of tensors of which the bytes of a block are known, and not how many they have.

    Args:
        tensors: as `BlockLayout` has them, with as many blocks each.
        nbytes: of a block in each tensor.
        num_backed: as `BlockLayout` has it.

    Raises:
        LayoutRefused: as `BlockLayout`, or no dimension or several could count such blocks.
    """
    first = tensors[0]
    whole = first.numel() * first.element_size()
    num_blocks = whole // nbytes
    found = [dim for dim, size in enumerate(first.shape) if nbytes % (whole // size) == 0]
    if len(found) != 1 or whole % nbytes:
        why = f"expected one dimension that counts blocks of {nbytes} bytes, found {len(found)}"
        raise _refused(first, num_blocks, why)
    return BlockLayout(tensors, num_blocks, found[0], num_backed)


def _refused(tensor: torch.Tensor, num_blocks: int, why: str) -> LayoutRefused:
    return LayoutRefused(
        f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, {num_blocks} blocks: {why}"
    )


def _find_block_dim(tensor: torch.Tensor, num_blocks: int, known: int | None) -> _BlockDim:
    sizes = tensor.shape
    if known is not None:
        if known >= len(sizes) or not sizes[known] or sizes[known] % num_blocks:
            raise _refused(tensor, num_blocks, f"expected dimension {known} to count blocks")
        return _BlockDim(known, sizes[known] // num_blocks)
    multiples = [d for d, size in enumerate(sizes) if size and size % num_blocks == 0]
    exact = [d for d in multiples if sizes[d] == num_blocks]
    # An outer dimension that is a multiple may count kernel blocks: then an exact one inside it
    # is something else of the same size.
    outermost = max((tensor.stride(d) for d in exact), default=-1)
    found = [d for d in multiples if d in exact or tensor.stride(d) > outermost]
    if len(found) != 1:
        raise _refused(
            tensor, num_blocks, f"expected one dimension that counts blocks, found {len(found)}"
        )
    return _BlockDim(found[0], sizes[found[0]] // num_blocks)


def _spans(
    tensor: torch.Tensor, block_dim: _BlockDim, storage: int, num_blocks: int
) -> list[_Span]:
    """A tensor's bytes of every block, as runs without gaps."""
    item = tensor.element_size()
    step = tensor.stride(block_dim.dim)
    others = [
        (stride, size)
        for d, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape))
        if d != block_dim.dim and size > 1
    ]
    inner = sorted((stride, size) for stride, size in others if stride < step)
    outer = [(stride, size) for stride, size in others if stride >= step]
    run = 1
    for stride, size in inner:
        if stride != run:
            raise _refused(tensor, num_blocks, "the bytes of a block have gaps or overlap")
        run *= size
    if block_dim.split > 1:
        if run != step:
            raise _refused(tensor, num_blocks, "the kernel blocks of a block are apart")
        run *= block_dim.split
    starts = [tensor.storage_offset()]
    for stride, size in outer:
        starts = [start + i * stride for start in starts for i in range(size)]
    if len(set(starts)) != prod(size for _, size in outer):
        raise _refused(tensor, num_blocks, "segments overlap")
    stride = step * block_dim.split * item
    return [_Span(storage, stride, start * item, run * item) for start in starts]


def _merge(spans: set[_Span], num_blocks: int) -> list[_Span]:
    """Join spans that touch or overlap within a block; refuse those that cross blocks."""
    merged: list[_Span] = []
    for span in sorted(spans, key=lambda s: (s.storage, s.stride, s.start, s.nbytes)):
        last = merged[-1] if merged else None
        same = last is not None and (last.storage, last.stride) == (span.storage, span.stride)
        if last is not None and same and span.start <= last.start + last.nbytes:
            nbytes = max(last.nbytes, span.start + span.nbytes - last.start)
            merged[-1] = _Span(last.storage, last.stride, last.start, nbytes)
        else:
            merged.append(span)
    _check_disjoint(merged, num_blocks)
    return merged


def _check_disjoint(spans: list[_Span], num_blocks: int) -> None:
    """No byte may belong to two blocks or to two rows."""
    for span in spans:
        if span.nbytes > span.stride:
            raise LayoutRefused(
                f"a block has {span.nbytes} bytes in a row whose "
                f"blocks are {span.stride} bytes apart, so blocks overlap"
            )
    # Within a storage, rows either lie side by side inside one block stride, or one after the
    # other; everything else would make two rows write the same bytes.
    by_start = sorted(spans, key=lambda s: (s.storage, s.start))
    for i, a in enumerate(by_start):
        for b in by_start[i + 1 :]:
            if b.storage != a.storage or b.start >= a.start + a.stride * num_blocks:
                break
            if a.stride != b.stride or b.start + b.nbytes > a.start + a.stride:
                raise LayoutRefused(
                    "rows of different KV tensors share bytes "
                    f"(at {a.start} and {b.start}, {a.stride} and {b.stride} bytes a block)"
                )


def _row(owner: torch.Tensor, span: _Span, num_blocks: int) -> torch.Tensor:
    raw = torch.empty(0, dtype=torch.uint8, device=owner.device)
    raw.set_(owner.untyped_storage())
    if span.start + span.stride * (num_blocks - 1) + span.nbytes > raw.numel():
        raise _refused(owner, num_blocks, "its blocks reach beyond its storage")
    return raw.as_strided((num_blocks, span.nbytes), (span.stride, 1), span.start)
