"""A tiny LLaVA: a language model of Llama's shape, and images of noise for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

IMAGE_TOKEN = 3  # becomes 64 placeholders, the same for every image
_SIDE, _PATCH = 48, 6  # pixels: 8 x 8 patches


def noise(seed: int) -> Any:
    """An image."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (_SIDE, _SIDE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def write(folder: Path, window: int = 0) -> Path:
    """Write config, weights, tokenizer and image processor; ``window``: as in `model`."""
    import torch
    from engine.model import HIDDEN, LAYERS, VOCABULARY
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration as Llava

    text = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=512, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=4096,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    if window:
        text.layer_types = ["sliding_attention", "full_attention"] * (LAYERS // 2)
        text.sliding_window = window
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        image_size=_SIDE, patch_size=_PATCH, projection_dim=64,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN,
        vision_feature_select_strategy="default", vision_feature_layer=-1,
    )  # fmt: skip
    config.dtype = torch.float32
    made = Llava(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() >= 2:
                gain = 1.0 if "embed_tokens" in name else 2 / weight[0].numel() ** 0.5
                weight.copy_(gain * torch.randn(weight.shape, generator=generator))
    made.save_pretrained(folder)
    _rename(folder / "model.safetensors")
    _write_processor(folder)
    return folder


def _rename(file: Path) -> None:
    """As checkpoints name the vision model's weights, and vLLM looks for them."""
    from safetensors.torch import load_file, save_file

    weights = {
        name.replace("vision_tower.vision_model.", "vision_tower.").replace(
            "vision_tower.", "vision_tower.vision_model."
        ): weight
        for name, weight in load_file(file).items()
    }
    save_file(weights, str(file), metadata={"format": "pt"})


def register() -> None:
    """Let vLLM import its LLaVA where there is no torchvision.

    The file names Pixtral's image processor as well, which needs it; LLaVA's own does not.
    """
    import without_torchvision
    from vllm import ModelRegistry

    with without_torchvision.importable():
        from vllm.model_executor.models.llava import LlavaForConditionalGeneration
    ModelRegistry.register_model("LlavaForConditionalGeneration", LlavaForConditionalGeneration)


def _write_processor(folder: Path) -> None:
    from engine.model import write_tokenizer

    write_tokenizer(folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    word = {"id": IMAGE_TOKEN, "content": f"t{IMAGE_TOKEN}", "special": True, **plain}
    file.write_text(json.dumps({**tokenizer, "added_tokens": [word]}))
    size = {"height": _SIDE, "width": _SIDE}
    image = {
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": _SIDE},
        "crop_size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    whole = {
        "processor_class": "LlavaProcessor", "patch_size": _PATCH, "image_token": word["content"],
        "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1,
    }  # fmt: skip
    (folder / "processor_config.json").write_text(json.dumps(whole))
