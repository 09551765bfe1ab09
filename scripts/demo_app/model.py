"""A small Llama with a real tokenizer, built without a network and kept between runs."""

import json
import random
import shutil
import sysconfig
from functools import cache
from pathlib import Path

from scripts.demo_app.settings import Settings

SEED = 0
VOCAB_SIZE = 4096
END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@cache
def library_text() -> str:
    """The source of the standard library's top-level modules, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    return "\n".join(
        path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.py"))
    )


def passages(sizes: list[int]) -> list[str]:
    """One random piece of the library's text per size (in characters); the same on every call."""
    text, rng = library_text(), random.Random(SEED)
    starts = [rng.randrange(len(text) - size) for size in sizes]
    return [text[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def build_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE on the library's text and save it with a chat template."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        library_text().splitlines(keepends=True),
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, USER, ASSISTANT],
        show_progress=False,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[USER, ASSISTANT],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def build_weights(folder: Path, size: Settings) -> None:
    """Save a Llama of the given size with random weights of a fixed seed as safetensors."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.max_model_len,
        # Large enough that answers depend on the whole prompt, so that a wrong KV block shows.
        initializer_range=1.3 * size.hidden**-0.5,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, size.dtype))
    model.save_pretrained(folder)


def ensure_model(folder: Path, size: Settings) -> None:
    """Build the model in `folder`, unless the one that lies there has this size already."""
    shape = [size.layers, size.hidden, size.heads, size.kv_heads, size.dtype, size.max_model_len]
    wanted = json.dumps([shape, CHAT_TEMPLATE, VOCAB_SIZE, SEED])
    mark = folder / "built-for.json"
    if mark.exists() and mark.read_text() == wanted:
        print(f"Model: {folder} (built before)")
        return
    print(f"Model: building {folder} ...", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    build_tokenizer(folder)
    build_weights(folder, size)
    mark.write_text(wanted)
