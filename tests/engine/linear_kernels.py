"""Linear attention without the GPU: its kernels in PyTorch, and plain heads for latent attention.

vLLM's kernels are Triton's, and its CPU build turns prefix caching off beside latent attention. So
the layers that attend to all tokens are those of vLLM's older models of the same family. Plain
vLLM plays with the same.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Put them in the places of vLLM's own, in this process."""
    from vllm.model_executor.layers.mamba.linear import bailing_linear_attn as layer
    from vllm.model_executor.models import bailing_moe_linear as model
    from vllm.third_party.flash_linear_attention.ops import layernorm_guard

    layer.layernorm_fn = _norm
    layernorm_guard.rmsnorm_fn = _norm
    layer.linear_attention_decode = _decode
    layer.MiniMaxText01LinearKernel.jit_linear_forward_prefix = staticmethod(_prefill)
    model.BailingMoeV25MLAAttention = _plain_heads()


def _plain_heads() -> Any:
    from vllm.model_executor.models.bailing_moe import BailingAttention

    class Heads(BailingAttention):  # type: ignore[misc, no-any-unimported]
        """With the arguments and the names of weights of the layer that it stands in for."""

        def __init__(
            self, config: Any, quant_config: Any = None, layer_id: int = 0, prefix: str = "",
            cache_config: Any = None,
        ) -> None:  # fmt: skip
            super().__init__(config, cache_config, quant_config, prefix=prefix)
            self._modules["o_proj"] = self._modules.pop("dense")

        @property
        def dense(self) -> Any:
            return self._modules["o_proj"]

    return Heads


def _norm(x: Any, weight: Any, bias: Any, z: Any = None, eps: float = 1e-6, **asked: Any) -> Any:
    """The root mean square of the last dimension is 1; without groups, gate and bias."""
    import torch

    width = x.shape[-1]
    assert bias is None and z is None and asked.get("group_size") in (None, width)
    spread = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x.float() * spread).to(x.dtype) * weight


def _prefill(q: Any, k: Any, v: Any, state: Any, slope: Any, block_size: int, **asked: Any) -> Any:
    """One prompt, token by token. q, k, v: (heads, tokens, d); state: (heads, d, d), written."""
    import torch

    found = [
        _advance(state, *(part[:, at] for part in (q, k, v)), slope) for at in range(q.size(1))
    ]
    return torch.stack(found)


def _decode(
    q: Any, k: Any, v: Any, states: Any, slope: Any, blocks: Any, q_start: int = 0,
    q_end: int | None = None, slot_start: int = 0, slot_end: int | None = None, **asked: Any,
) -> Any:  # fmt: skip
    """A token for each request. q, k, v: (tokens, heads, d); states: (blocks, heads, d, d)."""
    import torch

    of_tokens = zip(*(part[q_start:q_end] for part in (q, k, v)))
    slots = blocks[slot_start:slot_end].tolist()
    found = [_advance(states[slot], *token, slope) for slot, token in zip(slots, of_tokens)]
    return torch.stack(found)


def _advance(state: Any, q: Any, k: Any, v: Any, slope: Any) -> Any:
    """One token: the state fades, and takes it in; what comes out of all heads."""
    import torch

    state.copy_(torch.exp(-slope) * state + k[:, :, None] * v[:, None, :])
    return torch.einsum("hd,hde->he", q.float(), state.float()).reshape(-1).to(q.dtype)
