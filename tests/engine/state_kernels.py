"""What models with Mamba 1 or short convolutions need, and vLLM's CPU build lacks or has wrong.

A model with Mamba 1 needs the scan over a prompt and the update by a token, whose kernels the build
has for none or for Mamba 2 alone, and a product of matrices whose rows lie across memory. One with
short convolutions rotates queries and keys that have a dimension for heads; the build's kernel
takes other positions for them, so that an answer depends on what is asked beside it. Plain vLLM
plays with the same.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Put them in the places of vLLM's own, in this process."""
    from vllm import _custom_ops

    rotate, multiply = _custom_ops.rotary_embedding, _custom_ops.onednn_mm
    update_heads = getattr(_custom_ops, "selective_state_update_cpu", None)  # from 0.30 on

    def rotate_flat(positions: Any, query: Any, key: Any, *rest: Any) -> None:
        rotate(positions, _flat(query), key if key is None else _flat(key), *rest)

    def multiply_rows(handler: Any, x: Any, *rest: Any) -> Any:
        return multiply(handler, x if x.stride(-1) == 1 else x.contiguous(), *rest)

    def update(states: Any, *rest: Any) -> None:
        (_update if states.dim() == 3 else update_heads)(states, *rest)

    _custom_ops.rotary_embedding = rotate_flat
    _custom_ops.onednn_mm = multiply_rows
    _custom_ops.selective_scan_fwd = _scan
    _custom_ops.selective_state_update_cpu = update


def _flat(heads: Any) -> Any:
    """The same memory, without a dimension for heads."""
    return heads.view(heads.shape[0], -1) if heads.dim() == 3 else heads


def _scan(
    u: Any, delta: Any, a: Any, b: Any, c: Any, d: Any, z: Any, delta_bias: Any,
    delta_softplus: bool, query_start_loc: Any, cache_indices: Any, has_initial_state: Any,
    states: Any, null_block_id: int, *rest: Any,
) -> None:  # fmt: skip
    """As vLLM's kernel of that name: what comes out is in ``z``, the last states in ``states``.

    u, delta, z: (dim, tokens); a: (dim, numbers of a state); b, c: (1, numbers of a state, tokens);
    states: (blocks, dim, numbers of a state).
    """
    import torch

    step = _step(delta, delta_bias[:, None], delta_softplus)
    ends = query_start_loc.tolist()
    for at, (begin, end) in enumerate(zip(ends, ends[1:])):
        block = int(cache_indices[at])
        if block == null_block_id:
            continue
        state = torch.zeros_like(states[block], dtype=torch.float32)
        if has_initial_state[at]:
            state.copy_(states[block])
        for token in range(begin, end):
            of_token = (part[..., token] for part in (u, step, b[0], c[0], z))
            state, z[:, token] = _advance(state, a, d, *of_token)
        states[block].copy_(state)


def _update(
    states: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, z: Any, dt_bias: Any,
    dt_softplus: bool, read: Any, written: Any, null_block_id: int, out: Any, *rest: Any,
) -> None:  # fmt: skip
    """As vLLM's kernel of that name, but for states without heads: a token for each request."""
    step = _step(dt, dt_bias, dt_softplus)
    for at, (source, target) in enumerate(zip(read.flatten().tolist(), written.flatten().tolist())):
        if source != null_block_id:
            of_token = (part[at] for part in (x, step, b, c, z))
            states[target], out[at] = _advance(states[source].float(), a, d, *of_token)


def _step(delta: Any, bias: Any, softplus: bool) -> Any:
    from torch.nn.functional import softplus as smooth

    return smooth(delta.float() + bias) if softplus else delta.float() + bias


def _advance(state: Any, a: Any, d: Any, u: Any, step: Any, b: Any, c: Any, z: Any) -> Any:
    """One token: (the state behind it, what comes out)."""
    import torch
    from torch.nn.functional import silu

    state = torch.exp(step[:, None] * a) * state + (step * u)[:, None] * b
    return state, (state @ c.float() + d * u) * silu(z.float())
