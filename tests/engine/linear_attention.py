"""A tiny Bailing (Ling 2.5): linear attention and MLA take turns, no experts.

transformers has no configuration of its own for it, so it has that of a model with MLA; what vLLM's
model reads besides is in there, too. With plain heads instead (see `linear_kernels`) it has that of
Llama.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.model import HIDDEN, LAYERS, VOCABULARY, write_tokenizer

KIND = "bailing"
_HEADS, _HEAD_DIM, _INNER = 8, 64, 512
_LATENT, _ROPE, _NOPE, _VALUE, _LOW = 512, 64, 64, 128, 128  # of MLA
CONFIG: dict[str, Any] = {
    "architectures": ["BailingMoeV2_5ForCausalLM"], "model_type": "deepseek_v2",
    "hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": LAYERS,
    "num_attention_heads": _HEADS, "num_key_value_heads": _HEADS, "head_dim": _HEAD_DIM,
    "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    "hidden_act": "silu", "rope_theta": 10000.0, "kv_lora_rank": _LATENT, "q_lora_rank": _LOW,
    "qk_rope_head_dim": _ROPE, "qk_nope_head_dim": _NOPE, "v_head_dim": _VALUE,
    "layer_group_size": 2, "num_experts": 1, "num_experts_per_tok": 1,
    "first_k_dense_replace": LAYERS, "use_bias": False, "use_qkv_bias": False, "use_qk_norm": True,
    "group_norm_size": 1, "linear_silu": False,
}  # fmt: skip
# Rows, columns and gain of each matrix; a vector has ones, and one column.
_ALL = {
    "input_layernorm": (HIDDEN, 1, 0.0), "post_attention_layernorm": (HIDDEN, 1, 0.0),
    "mlp.gate_proj": (512, HIDDEN, 1.0), "mlp.up_proj": (512, HIDDEN, 1.0),
    "mlp.down_proj": (HIDDEN, 512, 1.0),
}  # fmt: skip
_LINEAR = {
    "query_key_value": (3 * _INNER, HIDDEN, 2.0), "query_layernorm": (_HEAD_DIM, 1, 0.0),
    "key_layernorm": (_HEAD_DIM, 1, 0.0), "g_proj": (_INNER, HIDDEN, 1.0),
    "g_norm": (_INNER, 1, 0.0), "dense": (HIDDEN, _INNER, 4.0),
}  # fmt: skip
_MLA = {
    "q_a_proj": (_LOW, HIDDEN, 1.0), "q_a_layernorm": (_LOW, 1, 0.0),
    "q_b_proj": (_HEADS * (_NOPE + _ROPE), _LOW, 2.0),
    "kv_a_proj_with_mqa": (_LATENT + _ROPE, HIDDEN, 2.0), "kv_a_layernorm": (_LATENT, 1, 0.0),
    "kv_b_proj": (_HEADS * (_NOPE + _VALUE), _LATENT, 3.0),
    "dense": (HIDDEN, _HEADS * _VALUE, 4.0),
}  # fmt: skip


_PLAIN = {
    name: _LINEAR[name] for name in ("query_key_value", "query_layernorm", "key_layernorm", "dense")
}


def write(folder: Path, latent: bool = True) -> Path:
    """Write config and weights, with the names that published weights have.

    Args:
        folder: is made.
        latent: whether the layers without linear attention have MLA, or else plain heads.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    about = CONFIG if latent else {**CONFIG, "model_type": "llama", "use_rmsnorm": True}
    (folder / "config.json").write_text(json.dumps(about))
    write_tokenizer(folder)
    generator = torch.Generator().manual_seed(0)

    def made(rows: int, columns: int, gain: float) -> torch.Tensor:
        if columns == 1:
            return torch.ones(rows)
        return gain / columns**0.5 * torch.randn(rows, columns, generator=generator)

    weights = {
        "model.word_embeddings.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator),
        "lm_head.weight": made(VOCABULARY, HIDDEN, 1.0),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        attention = (_MLA if latent else _PLAIN) if layer % 2 else _LINEAR
        parts = {**_ALL, **{f"attention.{name}": size for name, size in attention.items()}}
        for name, size in parts.items():
            weights[f"model.layers.{layer}.{name}.weight"] = made(*size)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
