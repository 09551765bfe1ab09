"""A tiny Llama half of whose tokens follow from the token before, and models that draft for it.

With the random weights of `model` no draft is ever accepted. Here every token has a successor,
in rings of six tokens, which its embedding gives a share of the answer; the rest depends on the
whole prompt, as in `model`. So drafts that guess the successor are accepted about half of the time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.model import HIDDEN, LAYERS, VOCABULARY, write_model, write_tokenizer

_RING = 6
_SHARE = 4.0  # what a token's embedding adds to its successor's row
_STATES_SHARE = 0.8  # the same with layers that keep a state
_MAMBA2_SHARE = 1.8  # and with Mamba 2, where four tokens of ten then follow from the one before
_ATTENTION = 0.5  # of the gains in `model`: the rest of an answer, the whole prompt's


def write(folder: Path, heads: int = 8, window: int = 0) -> dict[str, str]:
    """Write the target and its drafts; their folders by name.

    There are as many heads of keys: values are as wide as the model. With a window, every second
    layer of the target looks back that many tokens only, and so does the draft's; there is no MTP.
    """
    from safetensors.torch import load_file

    target = write_model(folder / "target", heads, heads, HIDDEN // heads, window)
    file = target / "model.safetensors"
    weights = load_file(file)
    for name in weights:
        if "v_proj" in name or "o_proj" in name:
            weights[name] *= _ATTENTION
    embedded = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"][_successors()] += _SHARE / 16 * embedded
    _save(file, weights)
    made = {"target": target, "eagle3": _write_eagle3(folder / "eagle3", target, weights)}
    if not window:  # MiMo's layers have none
        made["mtp"] = _write_mtp(folder / "mtp", target, weights)
    return {name: str(path) for name, path in made.items()}


def _successors() -> list[int]:
    """By token, the next of its ring; tokens before and behind the rings follow themselves."""
    found = list(range(VOCABULARY))
    for first in range(4, VOCABULARY - _RING, _RING):
        for at in range(_RING):
            found[first + at] = first + (at + 1) % _RING
    return found


def _write_eagle3(folder: Path, target: Path, weights: dict[str, Any]) -> Path:
    """One layer whose attention looks at its own token, and so guesses that token's successor."""
    import torch

    identity, ones = torch.eye(HIDDEN), torch.ones(HIDDEN)
    generator = torch.Generator().manual_seed(1)
    peaked = 3 / HIDDEN**0.5 * torch.randn(HIDDEN, HIDDEN, generator=generator)
    nothing = torch.zeros(HIDDEN, HIDDEN)
    made = {
        "fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN),
        "norm.weight": ones,
        "lm_head.weight": weights["lm_head.weight"],
        "midlayer.self_attn.q_proj.weight": torch.cat([peaked, nothing], dim=1),
        "midlayer.self_attn.k_proj.weight": torch.cat([peaked, nothing], dim=1),
        "midlayer.self_attn.v_proj.weight": torch.cat([identity, nothing], dim=1),
        "midlayer.self_attn.o_proj.weight": identity,
        "midlayer.mlp.gate_proj.weight": torch.zeros(512, HIDDEN),
        "midlayer.mlp.up_proj.weight": torch.zeros(512, HIDDEN),
        "midlayer.mlp.down_proj.weight": torch.zeros(HIDDEN, 512),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        made[f"midlayer.{name}.weight"] = ones
    changes = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCABULARY,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    if "layer_types" in json.loads((target / "config.json").read_text()):
        changes["layer_types"] = ["sliding_attention"]
    return _write(folder, target, changes, made)


def _write_mtp(folder: Path, target: Path, weights: dict[str, Any]) -> Path:
    """MiMo's architecture: the target with a layer that guesses the successor."""
    import torch

    layer = "model.mtp_layers.0."
    made = dict(weights)
    for name, weight in weights.items():
        if name.startswith("model.layers.0."):
            made[layer + name.removeprefix("model.layers.0.")] = weight
    for at in range(LAYERS):
        for name in "qkv":
            made[f"model.layers.{at}.self_attn.{name}_proj.bias"] = torch.zeros(HIDDEN)
            made[f"{layer}self_attn.{name}_proj.bias"] = torch.zeros(HIDDEN)
    made[layer + "self_attn.o_proj.weight"] = torch.zeros(HIDDEN, HIDDEN)
    made[layer + "mlp.down_proj.weight"] = torch.zeros(HIDDEN, 512)
    embedded_alone = [torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)]
    made[layer + "input_proj.weight"] = torch.cat(embedded_alone, dim=1)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        made[f"{layer}{name}.weight"] = torch.ones(HIDDEN)
    changes = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
    }
    return _write(folder, target, changes, made)


def _write(folder: Path, like: Path, changes: dict[str, Any], weights: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    config = json.loads((like / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    write_tokenizer(folder)
    _save(folder / "model.safetensors", weights)
    return folder


def _save(file: Path, weights: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    # Copies: a file does not take one tensor under two names.
    own = {name: weight.clone() for name, weight in weights.items()}
    save_file(own, str(file), metadata={"format": "pt"})


def write_mamba2(folder: Path, **changes: Any) -> Path:
    """Nemotron-H, some of whose tokens follow from the token before, as in its prompts.

    ``changes``: to its configuration.
    """
    from engine import architectures
    from safetensors.torch import load_file

    file = architectures.write("nemotron_h", folder, **changes) / "model.safetensors"
    weights = load_file(file)
    embedded = weights["backbone.embeddings.weight"]
    weights["lm_head.weight"][_successors()] += _MAMBA2_SHARE / 16 * embedded
    for name in weights:
        if name.endswith(("out_proj.weight", "o_proj.weight")):
            weights[name] *= _ATTENTION
    _save(file, weights)
    return folder


def write_states(folder: Path, **changes: Any) -> Path:
    """Qwen3-Next, half of whose layers keep a state, with a layer that guesses the successor.

    ``changes``: to its configuration.
    """
    import torch
    from engine import architectures
    from safetensors.torch import load_file

    file = architectures.write("qwen3_next", folder, **changes) / "model.safetensors"
    weights = load_file(file)
    embedded = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"][_successors()] += _STATES_SHARE / 16 * embedded
    for name in weights:
        if name.endswith("A_log"):
            # States fade slowly: a hit leaves a block of tokens to compute behind them.
            weights[name].fill_(-6.0)
    attention = f"model.layers.{LAYERS - 1}."
    for name in [name for name in weights if name.startswith(attention)]:
        silent = name.endswith(("o_proj.weight", "down_proj.weight"))
        made = torch.zeros_like(weights[name]) if silent else weights[name]
        weights["mtp.layers.0." + name.removeprefix(attention)] = made
    weights["mtp.fc.weight"] = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        weights[f"mtp.{name}.weight"] = torch.zeros(HIDDEN)  # one is added to these
    _save(file, weights)
    return folder
