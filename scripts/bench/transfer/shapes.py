"""The KV of models on one rank, as `bench transfer` lays it out: named layouts."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class Shape:
    """KV tensors of one kind, one for each layer.

    Attributes:
        title: what it stands for.
        layers: KV tensors.
        token: dimensions of what one token has in a layer, of K or of V if they are two.
        dtype: of its numbers.
        parts: dimensions before or behind that of the blocks: 2 for K and V, none for what is one.
        parts_first: whether they come first: K of all blocks, then V of all blocks.
    """

    title: str
    layers: int
    token: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    parts: tuple[int, ...] = (2,)
    parts_first: bool = True

    @property
    def token_bytes(self) -> int:
        """Bytes of a token over all layers."""
        return self.layers * prod(self.parts) * prod(self.token) * self.dtype.itemsize

    @property
    def block_dim(self) -> int:
        """The dimension that counts blocks."""
        return len(self.parts) if self.parts_first else 0

    def of_layer(self, num_blocks: int, tokens: int) -> tuple[int, ...]:
        """A layer's tensor with blocks of so many tokens."""
        outer = (*self.parts, num_blocks) if self.parts_first else (num_blocks, *self.parts)
        return (*outer, tokens, *self.token)


# What Llama-3.1-8B has, in the two orders that attention backends use.
BY_BYTES = {
    "apart": Shape("Llama-3.1-8B, K and V apart", 32, (8, 128)),
    "packed": Shape("Llama-3.1-8B, K and V of a block together", 32, (8, 128), parts_first=False),
}
# What bigger models have on a rank; their blocks are counted in tokens.
BY_TOKENS = {
    "mla": Shape("MLA as of DeepSeek-V3: 576 numbers a token and layer", 61, (576,), parts=()),
    "two_heads": Shape("2 KV heads: a rank of Llama-3.1-70B, tensor parallel over 4", 80, (2, 128)),
    "fp8": Shape("Llama-3.1-8B, KV in FP8", 32, (8, 128), torch.float8_e4m3fn),
}
SHAPES = {**BY_BYTES, **BY_TOKENS}
