"""Models that keep states, as `gpu_kinds` plays them: how each is written, and what must hold.

Their sizes are those that kernels for a GPU take: heads of 64 or 128, blocks of 128 tokens, which a
chunk of each kernel divides. vLLM has no kernels for states that compute each request as if it were
alone, so prompts asked together are compared but for ties.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from engine import architectures, linear_attention

BLOCKS = (500, 48)  # all prompts; a few: GPU blocks
# Where the two likeliest tokens are so close (natural log of the ratio), a batch of another size
# may choose the other in bfloat16; so many answers of eight may be cut short by that.
TIE, TIES = 0.1, 2
SCENARIOS = ["setup", "sensitivity", "lengths_alone", "outgrown"]
_ENGINE = {
    "block_size": 128, "enable_prefix_caching": True, "mamba_cache_mode": "align",
    "max_num_seqs": 16, "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}  # fmt: skip
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}  # of 64 numbers each
# By kind: the folder of its model, and arguments of `vllm.LLM` besides.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    # FlashInfer, which vLLM prefers on an H100, compiles its kernel when it is first used.
    "gated delta net": ("gdn", {"additional_config": {"gdn_prefill_backend": "triton"}}),
    "Mamba 2": ("mamba2", {}),
    "Mamba 1": ("mamba1", {}),
    "short convolutions": ("conv", {}),
    "linear attention": ("linear", {"attention_backend": "TRITON_MLA"}),
}
MODELS: dict[str, Callable[[Path], object]] = {
    "gdn": partial(architectures.write, "qwen3_next"),
    "mamba2": partial(
        architectures.write,
        "nemotron_h",
        num_key_value_heads=8,
        head_dim=64,
        ssm_state_size=64,
    ),
    "mamba1": partial(architectures.write, "jamba", **_HEADS),
    "conv": partial(architectures.write, "lfm2", **_HEADS),
    "linear": linear_attention.write,
}
_ERROR = re.compile(r"^(?:\(\w+ pid=\d+\) )*(?:\w+\.)*(\w*Error: .+)$", re.MULTILINE)


def engine(kind: str) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for a kind, but for the model."""
    return {**_ENGINE, **KINDS[kind][1]}


def ended(side: str, log: str) -> dict[str, Any]:
    """An engine that has not answered; that plain vLLM does not is no fault of the tier."""
    if side == "off":
        said = _ERROR.findall(log)
        why = said[-1] if said else log[-300:]
        return {"outcome": "skipped", "why": f"plain vLLM ends by itself: {why[:300]}"}
    return {"outcome": "failed", "why": f"{side}: {log}"}


def judge(off: dict[str, Any], on: dict[str, Any], found: dict[str, Any]) -> list[bool]:
    """What must hold besides equal answers; what was seen goes to ``found``."""
    alone = off["lengths_alone"]["cached"], on["lengths_alone"]["cached"]
    plain, tier = off["outgrown"], on["outgrown"]
    pairs = list(zip(plain["tokens"], tier["tokens"], plain["ahead"], tier["ahead"]))
    ties = [_tied(*pair) for pair in pairs if pair[0] != pair[1]]
    found.update(
        cached=list(alone),
        preemptions=tier["preemptions"],
        outgrown=len(pairs),
        outgrown_equal=len(pairs) - len(ties),
        outgrown_tied=sum(ties),
        held_up=tier["late"],
    )
    return [
        alone[0] == alone[1] > 0,
        tier["preemptions"] > 0,
        plain["preemptions"] == 0,
        all(ties) and len(ties) <= TIES,
        tier["late"] > 0,
    ]


def _tied(plain: list[int], tier: list[int], ahead: list[float], also_ahead: list[float]) -> bool:
    """Whether both engines had two tokens as good as each other where their answers part."""
    at = next(at for at, (one, other) in enumerate(zip(plain, tier)) if one != other)
    return max(ahead[at], also_ahead[at]) < TIE
