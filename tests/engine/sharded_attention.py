"""Attention of ranks that each hold a part of every block's tokens, for vLLM's CPU build.

With decode context parallelism (DCP) a token's keys and values are kept by one of the ranks, in
turn. vLLM has kernels for that for GPUs alone. Here each rank writes the tokens that are its own,
gathers what the others have of a prefix, and attends to all of it, in PyTorch. Which rank has which
token, and in which block, is vLLM's rule; plain vLLM plays with the same.
"""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    """Put it in the place of the CPU's attention, in this process and those forked from it."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.worker.block_table import BlockTable

    CPUAttentionBackendImpl.supports_dcp = True
    CPUAttentionBackendImpl.can_return_lse_for_decode = True
    CPUAttentionBackendImpl.do_kv_cache_update = _update
    CPUAttentionBackendImpl.forward = _forward
    BlockTable.compute_slot_mapping = _map_slots


def places(positions: Any, size: int, ranks: int, turn: int) -> tuple[Any, Any, Any]:
    """Of each token: its place in a request's block table, its rank, and its place in the block.

    Args:
        size: tokens of a block that a rank has.
        turn: neighbouring tokens that the same rank has.
    """
    offsets = positions % (size * ranks)
    within = offsets // (turn * ranks) * turn + offsets % turn
    return positions // (size * ranks), offsets // turn % ranks, within


def _map_slots(self: Any, num_reqs: int, query_start_loc: Any, positions: Any) -> None:
    """As `BlockTable.compute_slot_mapping`: -1 for tokens of other ranks."""
    lengths = query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]
    rows = torch.repeat_interleave(torch.arange(num_reqs), lengths)
    turn = self.cp_kv_cache_interleave_size
    asked = positions[: len(rows)]
    column, owner, within = places(asked, self.block_size, self.dcp_world_size, turn)
    slots = self.block_table.gpu[rows, column] * self.block_size + within
    self.slot_mapping.gpu.fill_(-1)
    self.slot_mapping.gpu[: len(rows)] = torch.where(owner == self.dcp_rank, slots, -1)


def _update(self: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
    """Write what is this rank's: keys and values side by side, as they come."""
    slots = slot_mapping[: len(key)]
    own = slots >= 0
    size = kv_cache.shape[2]
    kv = torch.cat([key, value], -1)[: len(slots)][own]
    kv_cache[slots[own] // size, :, slots[own] % size] = kv.to(kv_cache.dtype)


def _forward(
    self: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any,
    output: Any, *_: Any, **__: Any,
) -> Any:  # fmt: skip
    """Every request's queries over the keys and values of all ranks."""
    if attn_metadata is None:
        return output
    starts = attn_metadata.query_start_loc.tolist()
    for row, end in enumerate(attn_metadata.seq_lens.tolist()):
        asked = slice(starts[row], starts[row + 1])
        if asked.start == asked.stop:
            continue
        kv = _gathered(attn_metadata.block_table[row], end, kv_cache)
        heads, width = kv.shape[1], self.head_size
        keys, values = kv[..., :width], kv[..., width:]
        queries = query[asked].view(-1, heads, self.num_heads // heads, width)
        seen = torch.arange(end - len(queries), end)[:, None] >= torch.arange(end)[None]
        scores = torch.einsum("qhgw,khw->hgqk", queries, keys) * self.scale
        shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        found = torch.einsum("hgqk,khw->qhgw", shares, values)
        output[asked] = found.reshape(output[asked].shape)
    return output


def _gathered(table: Any, end: int, kv_cache: Any) -> Any:
    """The first ``end`` tokens of a request, [token, head, key and value], from all ranks."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed import get_dcp_group

    ranks, size = get_dcp_group().world_size, kv_cache.shape[2]
    config = get_current_vllm_config_or_none()
    turn = config.parallel_config.cp_kv_cache_interleave_size if config else 1
    blocks = table[: -(-end // (size * ranks))].long()
    here = kv_cache[blocks].transpose(1, 2).contiguous()  # [block, token, head, both]
    parts = [torch.empty_like(here) for _ in range(ranks)]
    torch.distributed.all_gather(parts, here, group=get_dcp_group().device_group)
    column, owner, within = places(torch.arange(end), size, ranks, turn)
    return torch.stack(parts)[owner, column, within]
