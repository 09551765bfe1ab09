"""KV tensors as backends and releases lay them out: small, random, with bytes around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from kvoffload_patch.transfer.layout import BlockLayout

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32]
GUARD = 16  # elements before and after what the KV tensors use

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


@dataclass(frozen=True)
class Sizes:
    """Blocks, tokens of a block, heads, head size."""

    n: int
    bs: int
    h: int
    d: int


SIZES = [Sizes(7, 5, 3, 6), Sizes(3, 1, 1, 1), Sizes(11, 16, 2, 8)]


class Maker:
    """Allocates; every allocation has random bytes and guards of its own."""

    def __init__(self, dtype: torch.dtype, device: str, sizes: Sizes) -> None:
        self.dtype = dtype
        self.device = device
        self.sizes = sizes
        self.random = torch.Generator().manual_seed(sizes.n)

    def flat(self, numel: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        item = (dtype or self.dtype).itemsize
        nbytes = (numel + 2 * GUARD) * item
        raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=self.random)
        return raw.to(self.device).view(dtype or self.dtype)[GUARD : GUARD + numel]

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.flat(torch.Size(shape).numel(), dtype).view(shape)


Tensors = list[tuple[torch.Tensor, int]]  # with the dimension that counts blocks
Build = Callable[[Maker, Sizes], Tensors]
LAYOUTS: dict[str, Build] = {}


def layout(build: Build) -> Build:
    LAYOUTS[build.__name__] = build
    return build


@layout
def kv_outermost(make: Maker, s: Sizes) -> Tensors:
    return [(make(2, s.n, s.bs, s.h, s.d), 1)]


@layout
def blocks_outermost(make: Maker, s: Sizes) -> Tensors:
    return [(make(s.n, 2, s.bs, s.h, s.d), 0)]


@layout
def kv_innermost(make: Maker, s: Sizes) -> Tensors:
    return [(make(s.n, s.h, s.bs, 2 * s.d), 0)]


@layout
def k_and_v_apart(make: Maker, s: Sizes) -> Tensors:
    return [(make(s.n, s.bs, s.h, s.d), 0) for _ in "kv"]


@layout
def hnd_seen_as_nhd(make: Maker, s: Sizes) -> Tensors:
    return [(make(2, s.n, s.h, s.bs, s.d).permute(0, 1, 3, 2, 4), 1)]


@layout
def blocks_outermost_hnd_seen_as_nhd(make: Maker, s: Sizes) -> Tensors:
    return [(make(s.n, 2, s.h, s.bs, s.d).permute(1, 0, 3, 2, 4), 1)]


@layout
def heads_outermost_seen_as_blocks_first(make: Maker, s: Sizes) -> Tensors:
    return [(make(s.h, s.n, s.bs, s.d).permute(1, 2, 0, 3), 0)]


@layout
def kv_and_heads_outermost(make: Maker, s: Sizes) -> Tensors:
    return [(make(2, s.h, s.n, s.bs, s.d).permute(0, 2, 3, 1, 4), 1)]


@layout
def latent(make: Maker, s: Sizes) -> Tensors:
    return [(make(s.n, s.bs, s.d), 0) for _ in range(3)]


@layout
def kernel_blocks(make: Maker, s: Sizes) -> Tensors:
    return [(make(s.n * 2, 2, s.bs, s.h, s.d), 0), (make(s.n * 4, s.bs, s.d), 0)]


@layout
def kernel_blocks_behind_kv(make: Maker, s: Sizes) -> Tensors:
    return [(make(2, s.n * 4, s.bs, s.h, s.d), 1)]


@layout
def kernel_blocks_beside_whole_ones(make: Maker, s: Sizes) -> Tensors:
    return [(make(s.n * 2, s.bs, s.d), 0), (make(s.n, 2, s.bs, s.d), 0)]


@layout
def layers_outermost_in_one_allocation(make: Maker, s: Sizes) -> Tensors:
    return [(layer, 1) for layer in make(4, 2, s.n, s.bs, s.h, s.d)]


@layout
def layers_within_blocks(make: Maker, s: Sizes) -> Tensors:
    packed = make(s.n, 4, 2, s.bs, s.h, s.d)
    return [(packed[:, i], 0) for i in range(4)]


@layout
def some_layers_within_blocks(make: Maker, s: Sizes) -> Tensors:
    packed = make(s.n, 5, s.h, s.bs, 2 * s.d)
    return [(packed[:, i], 0) for i in (3, 0, 1)]


@layout
def padded_blocks(make: Maker, s: Sizes) -> Tensors:
    page = s.bs * s.h * s.d
    return [(make(s.n, page + 3)[:, 1 : page + 1].unflatten(1, (s.bs, s.h, s.d)), 0)]


@layout
def pages_of_different_sizes_within_blocks(make: Maker, s: Sizes) -> Tensors:
    small, large = s.bs * s.d, 2 * s.bs * s.h * s.d
    packed = make(s.n, small + 2 + large)
    return [
        (packed[:, :small].unflatten(1, (s.bs, s.d)), 0),
        (packed[:, small + 2 :].unflatten(1, (2, s.bs, s.h, s.d)), 0),
    ]


@layout
def different_dtypes(make: Maker, s: Sizes) -> Tensors:
    scales = make(s.n, s.bs, 1, dtype=torch.float32)
    marks = make(2, s.n, s.bs, dtype=torch.uint8)
    return [(make(2, s.n, s.bs, s.h, s.d), 1), (scales, 0), (marks, 1)]


@layout
def different_dtypes_within_blocks(make: Maker, s: Sizes) -> Tensors:
    packed = make(s.n, 4 * s.bs * s.d + 8 * s.bs, dtype=torch.uint8)
    first = packed[:, : 4 * s.bs * s.d].view(make.dtype)
    return [(first, 0), (packed[:, 4 * s.bs * s.d :].view(torch.float32), 0)]


@layout
def one_tensor_twice(make: Maker, s: Sizes) -> Tensors:
    tensor = make(2, s.n, s.bs, s.h, s.d)
    return [(tensor, 1), (tensor, 1), (tensor.view(2, s.n, s.bs, s.h * s.d), 1)]


@layout
def one_allocation_seen_in_two_ways(make: Maker, s: Sizes) -> Tensors:
    """An attention layer and the two states of a recurrent one share their pages."""
    pages = make(s.n, 2, s.bs, 2 * s.h * s.d)
    flat = pages.view(s.n, -1)
    middle = s.bs * s.h * s.d
    state = flat[:, :middle].view(torch.uint8)
    return [(state, 0), (pages.transpose(0, 1), 1), (flat[:, middle : middle + s.d], 0)]


@layout
def parts_of_a_page_that_overlap(make: Maker, s: Sizes) -> Tensors:
    pages = make(s.n, 5 * s.bs)
    return [(pages[:, : 4 * s.bs], 0), (pages[:, 3 * s.bs :], 0)]


@layout
def unused_dimensions(make: Maker, s: Sizes) -> Tensors:
    return [(make(1, s.n, s.bs, 1, s.d), 1), (make(s.n, 1, s.bs, s.d).expand(s.n, 1, -1, -1), 0)]


@dataclass
class Case:
    """A layout's KV tensors, and where its blocks are by construction."""

    num_blocks: int
    tensors: list[torch.Tensor]
    dims: list[int]

    def layout(self) -> BlockLayout:
        return BlockLayout(self.tensors, self.num_blocks)

    def views(self, block: int) -> list[torch.Tensor]:
        """What belongs to a block, by index; says nothing of rows."""
        found = []
        for tensor, dim in zip(self.tensors, self.dims):
            split = tensor.shape[dim] // self.num_blocks
            found.append(tensor.narrow(dim, block * split, split))
        return found

    def content(self, block: int) -> list[list[int]]:
        """The bytes of a block as its tensors show them."""
        return [as_bytes(view) for view in self.views(block)]

    def storages(self) -> list[torch.Tensor]:
        """The whole of every allocation, guards included, as bytes."""
        found = {}
        for tensor in self.tensors:
            storage = tensor.untyped_storage()
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            found[storage.data_ptr()] = raw.set_(storage)
        return list(found.values())

    def untouched(self, blocks: list[int]) -> list[torch.Tensor]:
        """The bytes of every allocation that belong to none of these blocks."""
        addresses = [
            a for block in blocks for view in self.views(block) for a in addresses_of(view)
        ]
        rest = []
        for raw in self.storages():
            keep = torch.ones(raw.numel(), dtype=torch.bool)
            inside = [a - raw.data_ptr() for a in addresses]
            inside = [offset for offset in inside if 0 <= offset < raw.numel()]
            keep[inside] = False
            rest.append(raw.cpu()[keep])
        return rest


def build(
    name: str, dtype: torch.dtype = torch.bfloat16, sizes: Sizes = SIZES[0], device: str = "cpu"
) -> Case:
    tensors = LAYOUTS[name](Maker(dtype, device, sizes), sizes)
    return Case(sizes.n, [tensor for tensor, _ in tensors], [dim for _, dim in tensors])


def as_bytes(view: torch.Tensor) -> list[int]:
    flat = view.clone(memory_format=torch.contiguous_format).flatten()
    found: list[int] = flat.view(torch.uint8).tolist()
    return found


def addresses_of(view: torch.Tensor) -> list[int]:
    """The address of every byte of a view, from its shape and strides alone."""
    item = view.element_size()
    found = torch.arange(item)
    for size, stride in zip(view.shape, view.stride()):
        steps = torch.arange(size) * (stride * item)
        found = (steps[:, None] + found[None, :]).flatten()
    addresses: list[int] = (found + view.data_ptr()).tolist()
    return addresses


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right))
