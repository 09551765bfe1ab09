"""Two kernels of Mamba 2 that vLLM's CPU build lacks from 0.32 on, made of those that it has.

A prompt's last step leaves a state behind at an end of a block. On a GPU the scan returns the state
behind each of its chunks for that, and a Triton kernel writes it to its block. The CPU's scan
returns the last one alone, so vLLM ends by itself there. Here the CPU's scan is called chunk by
chunk, and the write is PyTorch's. Plain vLLM plays with the same.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Put them in the places of vLLM's own, in this process."""
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops import ssd_combined

    as_made = ssd_combined._mamba_chunk_scan_combined_fwd

    def scan(*args: Any, **asked: Any) -> Any:
        if not asked.get("return_intermediate_states"):
            return as_made(*args, **asked)
        return _by_chunks(as_made, *args, **asked)

    ssd_combined._mamba_chunk_scan_combined_fwd = scan
    mamba_mixer2.store_prefill_checkpoint = _store_checkpoints


def _by_chunks(
    scan: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, chunk_size: int, out: Any, **asked: Any
) -> Any:
    """The state behind every chunk, in order; ``out`` is written."""
    import torch

    ends, of_sequence = asked["cu_chunk_seqlens"].tolist(), asked["seq_idx"].tolist()
    first, states = asked["initial_states"], list[Any]()
    for at, (begin, end) in enumerate(zip(ends, ends[1:])):
        goes_on = at > 0 and of_sequence[at] == of_sequence[at - 1]
        begun = first[of_sequence[at]][None] if first is not None else None
        part = slice(begin, end)
        found = torch.empty_like(out[part])
        one = {
            **asked,
            "return_intermediate_states": False,
            "initial_states": states[-1][None] if goes_on else begun,
            "cu_seqlens": torch.tensor([0, end - begin], dtype=torch.int32),
        }
        states.append(scan(x[part], dt[part], a, b[part], c[part], chunk_size, found, **one)[0])
        out[part] = found
    return torch.stack(states)


def _store_checkpoints(
    checkpoint: Any, chunk_idx: Any, x: Any, conv_state: Any, chunk_states: Any, ssm_state: Any,
    query_start_loc: Any, *, state_len: int,
) -> None:  # fmt: skip
    """As vLLM's kernel of that name: a row without a checkpoint has offset 0 and writes nothing."""
    rows = zip(
        checkpoint.checkpoint_offsets.tolist(), checkpoint.state_indices.tolist(),
        chunk_idx.tolist(), query_start_loc.tolist(),
    )  # fmt: skip
    for offset, block, chunk, begin in rows:
        if offset > 0:
            end = begin + offset
            conv_state[block, :, :state_len] = x[:, end - state_len : end]
            ssm_state[block] = chunk_states[chunk]
