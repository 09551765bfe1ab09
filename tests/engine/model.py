"""A tiny Llama that needs no download; ``python model.py FOLDER [HEAD_DIM]`` writes it.

Its weights are made so that answers depend on the whole prompt. With vLLM's own dummy weights a
token depends on the one before it alone, and an engine that lost its KV cache would answer just
the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

VOCABULARY = 1024
HIDDEN = 256
LAYERS = 4
CHUNK = 128  # tokens; whole blocks of it, whatever size a release gives them


def write_model(
    folder: Path, heads: int = 8, kv_heads: int = 4, head_dim: int = 32, window: int = 0
) -> Path:
    """Write config and weights.

    With a window, every second layer looks back that many tokens only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    if window:
        kinds = ["sliding_attention", "full_attention"] * (LAYERS // 2)
        config.update(layer_types=kinds, sliding_window=window)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    _write_weights(folder / "model.safetensors", heads * head_dim, kv_heads * head_dim)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A word for each token; vLLM 0.9 loads a tokenizer even where it is told not to."""
    vocabulary = {f"t{token}": token for token in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def _write_weights(file: Path, q_size: int, kv_size: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return gain / columns**0.5 * torch.randn(rows, columns, generator=generator)

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        base = f"model.layers.{layer}."
        weights[base + "input_layernorm.weight"] = torch.ones(HIDDEN)
        weights[base + "post_attention_layernorm.weight"] = torch.ones(HIDDEN)
        # Peaked attention with a strong say: single tokens far back decide the answer.
        for name, rows, gain in (("q", q_size, 2.0), ("k", kv_size, 2.0), ("v", kv_size, 4.0)):
            weights[f"{base}self_attn.{name}_proj.weight"] = matrix(rows, HIDDEN, gain)
        weights[base + "self_attn.o_proj.weight"] = matrix(HIDDEN, q_size, 4.0)
        weights[base + "mlp.gate_proj.weight"] = matrix(512, HIDDEN)
        weights[base + "mlp.up_proj.weight"] = matrix(512, HIDDEN)
        weights[base + "mlp.down_proj.weight"] = matrix(HIDDEN, 512)
    save_file(weights, str(file), metadata={"format": "pt"})


def write_lora(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter for the attention projections, with random weights."""
    import torch
    from safetensors.torch import save_file

    rank, generator = 8, torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, out in (("q_proj", 256), ("v_proj", 128)):
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{base}.lora_A.weight"] = torch.randn(rank, HIDDEN, generator=generator)
            weights[f"{base}.lora_B.weight"] = torch.randn(out, rank, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), head_dim=int(sys.argv[2]) if sys.argv[2:] else 32)
