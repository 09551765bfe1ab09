"""What a hit moves, by kinds of layers: over vLLM's own scheduler, every token compared.

`scripts/matrix features` makes a table of what is recorded here. A page is what one layer keeps for
the tokens of a block. All models have two layers: with full attention alone a block is two pages,
with two kinds of layers it is one page of either.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("vllm")

from integration.engine.mini import BLOCK, Mini
from scheduler_half.device import Chunk
from scheduler_half.scenarios import prompt

FIELD = 128  # tokens that the second kind of layer sees
SHAPES: dict[str, tuple[Any, ...]] = {
    "full attention": (None,),
    "sliding window": (None, FIELD),
    "chunks": (None, Chunk(FIELD)),
}


def needed(shape: str, blocks: int) -> int:
    """Blocks without which the next token behind a hit of so many cannot be computed."""
    if shape == "sliding window":
        return blocks + -(-(FIELD - 1) // BLOCK)
    return blocks + (blocks * BLOCK % FIELD // BLOCK if shape == "chunks" else 0)


@pytest.mark.parametrize("blocks", [12, 36, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_hit_loads_and_counts_the_blocks_that_it_needs(
    shape: str, blocks: int, record_property: Any
) -> None:
    groups = SHAPES[shape]
    mini = Mini(load_mode="inline", store="eager", windows=groups, blocks=260, num_slots=1000)
    mini.only_in_cpu(prompt(blocks, seed=1))
    stats = mini.manager.stats
    stored, before = stats.stored, stats.loaded
    name = mini.add(prompt(blocks, seed=1), count=3)
    mini.run()
    mini.check()
    assert mini.hits[name] == blocks * BLOCK
    loaded = stats.loaded - before
    assert loaded == needed(shape, blocks) == sum(len(t.source_ids) for t in _loads(mini))
    pages = 2 // len(groups)
    moved = {"tokens": blocks * BLOCK, "loaded": loaded * pages, "stored": stored * pages}
    record_property("moved", json.dumps({"shape": shape, **moved}))


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_stored_is_what_hits_of_any_length_need(shape: str) -> None:
    """A prompt may end anywhere: a window before each of its ends is kept, and no block twice."""
    groups = SHAPES[shape]
    mini = Mini(load_mode="inline", store="eager", windows=groups, blocks=260, num_slots=1000)
    mini.only_in_cpu(prompt(36, seed=1))
    assert mini.manager.stats.stored == 36 * len(groups)
    for blocks in (35, 20, 9, 1):
        mini.pool.free_blocks(mini.pool.get_new_blocks(mini.pool.get_num_free_blocks()))
        name = mini.add([*prompt(blocks, seed=1, tail=0), 7], count=1)
        mini.run()
        assert mini.hits[name] == blocks * BLOCK
    mini.check()
    assert mini.manager.stats.stored == 36 * len(groups)


@pytest.mark.parametrize("shape", ["sliding window", "chunks"])
def test_room_is_asked_for_what_a_request_keeps(shape: str) -> None:
    """The prompt's 37 blocks and what its second kind of layer sees and computes, not both twice.

    So vLLM admits it with 64 blocks, and a tier that asks for 74 would let it be computed.
    """
    groups = SHAPES[shape]
    mini = Mini(load_mode="inline", store="eager", windows=groups, blocks=64, num_slots=1000)
    mini.only_in_cpu(prompt(36, seed=1))
    name = mini.add(prompt(36, seed=1), count=3)
    mini.run()
    mini.check()
    assert mini.hits[name] == 36 * BLOCK


# Models as they are published: layers of full attention and such that keep a state, KV heads and
# their size, and the state that a layer keeps, as vLLM's own calculator has it.
PUBLISHED: dict[str, tuple[int, int, int, int, str, dict[str, int], str]] = {
    "Qwen3-Next 80B (gated delta net)": (
        12, 36, 2, 256, "gated_delta_net_state_shape",
        {"num_k_heads": 16, "num_v_heads": 32, "head_k_dim": 128, "head_v_dim": 128,
         "conv_kernel_size": 4}, "bfloat16",
    ),
    "Nemotron-H 8B (Mamba 2)": (
        4, 24, 8, 128, "mamba2_state_shape",
        {"intermediate_size": 8192, "n_groups": 8, "num_heads": 128, "head_dim": 64,
         "state_size": 128, "conv_kernel": 4}, "float32",
    ),
    "Bamba 9B (Mamba 2)": (
        3, 29, 8, 128, "mamba2_state_shape",
        {"intermediate_size": 8192, "n_groups": 1, "num_heads": 128, "head_dim": 64,
         "state_size": 128, "conv_kernel": 4}, "bfloat16",
    ),
    "Jamba 52B (Mamba 1)": (
        4, 28, 8, 128, "mamba1_state_shape",
        {"intermediate_size": 8192, "state_size": 16, "conv_kernel": 4}, "bfloat16",
    ),
    "LFM2 1.2B (short convolutions)": (
        6, 10, 8, 64, "short_conv_state_shape", {"intermediate_size": 2048, "conv_kernel": 3},
        "bfloat16",
    ),
}  # fmt: skip
HIT = 8192  # tokens
MOST_PADDING = 0.005  # of the bytes of such a hit
KERNEL_TOKENS = 16  # of a block are a multiple of these, with FlashAttention


@pytest.mark.parametrize("model", PUBLISHED)
def test_padding_of_states_is_little_of_what_a_hit_moves(model: str, record_property: Any) -> None:
    """A hit moves one page of each layer that keeps a state, and all pages of the others."""
    full, keeping, *sizes = PUBLISHED[model]
    state, attention = _bytes(*sizes)
    tokens = -(-state // (attention * KERNEL_TOKENS)) * KERNEL_TOKENS
    page = tokens * attention
    moved = (HIT // tokens * full + keeping) * page
    share = keeping * (page - state) / moved
    assert 0 <= page - state < attention * KERNEL_TOKENS
    assert share < MOST_PADDING
    about = {"model": model, "tokens": tokens, "page": page, "state": state, "of a hit": share}
    record_property("padding", json.dumps(about))


def _bytes(heads: int, size: int, shape: str, arguments: dict[str, int], dtype: str) -> Any:
    """Of a layer's state, and of the KV of a token, by vLLM's own calculators and specs."""
    import torch
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    shapes = getattr(MambaStateShapeCalculator, shape)(tp_world_size=1, **arguments)
    dtypes = (torch.bfloat16, getattr(torch, dtype))[: len(shapes)]
    state = MambaSpec(block_size=1, shapes=shapes, dtypes=dtypes)
    token = FullAttentionSpec(
        block_size=1, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16
    )
    return state.page_size_bytes, token.page_size_bytes


def _loads(mini: Mini) -> list[Any]:
    """Loads of the last plan that has any."""
    return next(list(plan.before) for plan in reversed(mini.plans) if plan.before)
