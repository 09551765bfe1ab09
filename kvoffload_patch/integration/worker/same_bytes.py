"""Which ranks hold the same bytes in every block of KV.

Tensor-parallel ranks do where there is nothing to divide: MLA keeps one latent for all heads, and a
model with fewer KV heads than ranks has each head on several. Where such ranks hold a part of each
block's tokens, those with the same part do. Ranks that divide a prompt between them (prefill
context parallelism) do not: each computes the KV of its answers in steps of its own shape, so the
last bits may differ. Read from what was built, layer by layer, because one model may have layers of
several kinds; what is not understood is not the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

# Its blocks hold what every rank computes alike, from weights that every rank has.
_LATENT = "MLAAttentionSpec"
_STATE = "MambaSpec"


def same_bytes(worker: Any, layout: Any) -> str:
    """The same text on ranks of an engine that hold the same bytes; empty if no other does.

    Args:
        layout: the rank's `BlockLayout`; ranks whose blocks are laid out in another way differ.
    """
    parallel = worker.vllm_config.parallel_config
    ranks = getattr(parallel, "tensor_parallel_size", 1)
    if ranks < 2:
        return ""
    # With decode context parallelism, neighbours with the same heads have a part of each block's
    # tokens each, after the ranks that divide a prompt (`_DCP` in
    # vllm/distributed/parallel_state.py).
    prefill = getattr(parallel, "prefill_context_parallel_size", 1)
    parts = max(1, getattr(parallel, "decode_context_parallel_size", 1) // prefill)
    replicas = _replicas(worker.model_runner, ranks)
    if replicas <= parts or replicas % parts:
        return ""
    # A rank's number counts pipeline stages, within one those that divide a prompt, and within one
    # of these the tensor-parallel ranks.
    stage, rank = divmod(worker.rank, ranks)
    shape = repr([(offset, tuple(row.shape)) for offset, row in zip(layout.offsets, layout.rows)])
    digest = hashlib.sha256(shape.encode()).hexdigest()[:16]
    heads = f"part {rank // replicas} of {ranks // replicas}"
    return f"stage {stage}, {heads}, tokens {rank % parts} of {parts}, {digest}"


def _replicas(runner: Any, ranks: int) -> int:
    """So many neighbouring ranks hold the same in every layer; 1 if in any they do not."""
    layers = dict(_layers(runner.kv_cache_config))
    modules = dict(runner.get_model().named_modules()) if layers else {}
    found = {_of_layer(name, spec, modules, ranks) for name, spec in layers.items()}
    return found.pop() if len(found) == 1 else 1


def _layers(kv_cache_config: Any) -> Iterator[tuple[str, Any]]:
    """Names of the layers that have blocks, and their specs."""
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        members = getattr(spec, "kv_cache_specs", None)
        for name in group.layer_names:
            yield name, spec if members is None else members[name]


def _of_layer(name: str, spec: Any, modules: Mapping[str, Any], ranks: int) -> int:
    if type(spec).__name__ == _LATENT:
        return ranks
    if type(spec).__name__ == _STATE:
        return 1  # each rank has the states of its own heads, whatever is beside them
    # `model.layers.0.self_attn.attn`: beside it is what its keys and values come from. A layer of
    # a drafting model is not found in the model.
    projection = modules.get(f"{name.rpartition('.')[0]}.qkv_proj")
    return getattr(projection, "num_kv_head_replicas", 1) if name in modules else 1
