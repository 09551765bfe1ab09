"""Tiny models of architectures other than Llama's.

Configurations are the real classes of `transformers`; weights are random, with gains that make
answers depend on every block of the prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.model import HIDDEN, VOCABULARY, write_tokenizer

_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 4, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}  # fmt: skip
_LINEAR = ["linear_attention", "full_attention"] * 2
# What Qwen3-Next and Qwen3.5 have alike: gated delta nets beside full attention, and experts.
_DELTA_NETS = {
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "layer_types": _LINEAR,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
# Without `mrope_section`, which vLLM takes out of a model's configuration for text, and not out of
# that of its drafts: their rotation on the CPU would write beyond the queries.
_QWEN3_5 = {**_DELTA_NETS, "mtp_num_hidden_layers": 1}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_DELTA_NETS, **_EXPERTS, "intermediate_size": 256, "decoder_sparse_step": 1,
    },
    "qwen3_5_text": {**_QWEN3_5, "intermediate_size": 256},
    "qwen3_5_moe_text": {**_QWEN3_5, **_EXPERTS},
    # Short convolutions beside full attention.
    "lfm2": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512,
        "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "conv_bias": False,
        "conv_dim": HIDDEN, "conv_dim_out": HIDDEN, "block_dim": HIDDEN, "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
    },
    # Mamba 2 beside full attention.
    "nemotron_h": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
        "intermediate_size": 512, "layers_block_type": ["mamba", "attention"] * 2,
        "mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 16, "n_groups": 2,
        "chunk_size": 128, "conv_kernel": 4, "expand": 2,
    },
    # Mamba 1 beside full attention.
    "jamba": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 256,
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "num_experts_per_tok": 1,
        "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    },
    # Attention within chunks of 256 tokens beside full attention, and experts.
    "llama4_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
        "intermediate_size": 64, "intermediate_size_mlp": 256, "num_local_experts": 4,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 256,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
    },
    # Experts, full attention.
    "mixtral": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
        "intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    # Latent attention: 576 numbers a token and layer, whatever the number of heads. The sizes are
    # those of the smallest kernels for a GPU that vLLM takes for it.
    "deepseek_v2": {
        "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 512,
        "q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "first_k_dense_replace": 4,
    },
}  # fmt: skip

# For the CPU: numbers of 16 bits are slow on a processor without instructions for them.
FEWER_LAYERS: dict[str, dict[str, Any]] = {
    kind: {"num_hidden_layers": 2, "layer_types": _LINEAR[:2]}
    for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
}


def write(kind: str, folder: Path, **changes: Any) -> Path:
    """Write config and weights of a kind of model, with changes to its configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(kind, **{**_COMMON, **KINDS[kind], **changes})
    config.dtype = torch.float32
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_layernorm" in name:
                weight.fill_(4.0)  # else queries and keys are too short to single tokens out
            if weight.dim() < 2 or "conv1d" in name or name.endswith("A_log"):
                continue
            gain = 1.0 if "embed" in name else _gain(name) / weight.shape[-1] ** 0.5
            weight.copy_(gain * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    if kind == "nemotron_h":
        _rename(folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "torch_dtype": "float32"}))
    write_tokenizer(folder)
    return folder


def _rename(file: Path) -> None:
    """Give weights of Nemotron-H the names that published ones have, which every vLLM knows."""
    from safetensors.torch import load_file, save_file

    found = {}
    for name, weight in load_file(file).items():
        part = name.removeprefix("model.").removeprefix("backbone.")
        if part.startswith("embedding"):
            part = "embeddings.weight"
        found[part if part.startswith("lm_head") else f"backbone.{part}"] = weight
    save_file(found, str(file), metadata={"format": "pt"})


def _gain(name: str) -> float:
    """Attention and states have a strong say: single tokens far back decide the answer."""
    if ".conv." in name:
        return 1.0  # three factors of a product, which has enough of a say
    if any(part in name for part in ("v_proj", "o_proj", "out_proj", "in_proj", "kv_b_proj")):
        return 3.0
    parts = ("q_proj", "k_proj", "q_b_proj", "kv_a_proj")
    return 2.0 if any(part in name for part in parts) else 1.0
