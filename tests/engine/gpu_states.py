"""Models that keep states, as `gpu_kinds` plays them: how each is written, and what must hold.

Their sizes are those that kernels for a GPU take: heads of 64 or 128, blocks of 128 tokens, which a
chunk of each kernel divides. vLLM has no kernels for states that compute each request as if it were
alone, so of prompts asked together in a cache that they outgrow, answers may part where two tokens
are as good as each other. Plain vLLM then computes each such answer as a prompt, which tells how
far its tokens are behind the likeliest ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from engine import architectures, drafts, linear_attention

ROUND = 10  # prompts that are asked alone, three times
BLOCKS = (500, 48)  # all prompts; a few: GPU blocks
EVERY_BLOCKS = (1000, 48)  # the same where each block of a prompt has its state as well
# Where prompts are asked together, so far may a token of the tier be behind the likeliest one, when
# all of its answer is computed as a prompt (natural log of their ratio), or as far as plain vLLM's.
# Sums of bfloat16 round otherwise there: 0.17 was seen, of plain vLLM's as well, with or without a
# tier, and 0.25 and more where states are lost (on the CPU).
NEAR = 0.2
# All tokens together: so many times as far as plain vLLM's, and so much more.
MORE, BESIDES = 1.5, 1.0
SCENARIOS = ["setup", "sensitivity", "lengths_alone", "outgrown"]
_ENGINE = {
    "block_size": 128, "enable_prefix_caching": True, "mamba_cache_mode": "align",
    "max_num_seqs": 16, "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}  # fmt: skip
# Loads beside the step: vLLM's runners copy a state on before loads within the step begin.
CONNECTOR = {
    "kv_connector": "StateConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "state_connector",
    "kv_connector_extra_config": {"use_async": True},
    "kv_load_failure_policy": "fail",
}
# By kind, arguments besides. The connector keeps states at ends of steps alone, and a step of Mamba
# 2 does not end with a block where that leaves states within it: two blocks are a step then.
BESIDE_CONNECTOR: dict[str, dict[str, Any]] = {
    "gated delta net": {},
    "Mamba 2": {"max_num_batched_tokens": 256},
}
N_GRAMS = {
    "method": "ngram",
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
    "num_speculative_tokens": 3,
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}  # of 64 numbers each
_EXACT = {"dtype": "float32", "attention_backend": "TRITON_ATTN"}  # where the kernels take it
# By kind: the folder of its model, and arguments of `vllm.LLM` besides.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    # FlashInfer, which vLLM prefers on an H100, compiles its kernel when it is first used.
    "gated delta net": ("gdn", {"additional_config": {"gdn_prefill_backend": "triton"}}),
    "Mamba 2": ("mamba2", _EXACT),
    "Mamba 1": ("mamba1", _EXACT),
    "short convolutions": ("conv", _EXACT),
    "linear attention": ("linear", {"attention_backend": "TRITON_MLA"}),
}
# Those that vLLM up to 0.31 can keep at the end of every block, with model runner V1 alone. Its own
# blocks of Mamba 1 would be of 2,048 tokens.
AT_EVERY_BLOCK = ("Mamba 2", "Mamba 1")
EVERY_BLOCK = {"mamba_cache_mode": "all", "mamba_block_size": 128}
# By way of playing gated delta nets: the model, arguments besides, and the number of groups.
GDN_WAYS: dict[str, tuple[str, dict[str, Any], int]] = {
    "with drafts": (
        "guessing", {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}, 3,
    ),
    # What a hit of vLLM's own has beyond whole blocks, the tier has not.
    "with hits within a block": ("gdn", {"prefix_match_unit": 16}, 2),
    "on two stages": ("gdn", {"pipeline_parallel_size": 2}, 2),
}  # fmt: skip
STUCK = 8  # so many tokens of an answer are never the same one, or its logits were no numbers
# Of these, the ways in which plain vLLM's answers behind a hit of its own are not always those that
# it computed. A hit that ends within a block begins a prefill in the middle of a kernel's chunk;
# why one beside drafts answers otherwise is not known.
UNREPEATED = ("with drafts", "with hits within a block")
# Answers of a first round, before which nothing has been loaded, that plain vLLM does not always
# repeat itself (docs/shapes.md, "Linear attention on a GPU"); those of later rounds are compared.
UNSTEADY = {"linear attention": ROUND}
# Two heads of values to each of keys: with one, the kernel for a GPU refuses its inputs.
_GDN_HEADS = {"linear_num_value_heads": 4}
_MAMBA2 = {"num_key_value_heads": 8, "head_dim": 64, "ssm_state_size": 64}
MODELS: dict[str, Callable[[Path], object]] = {
    "gdn": partial(architectures.write, "qwen3_next", **_GDN_HEADS),
    # Ranks have parts of blocks where they have the same KV heads.
    "gdn, one KV head": partial(
        architectures.write, "qwen3_next", **_GDN_HEADS, num_key_value_heads=1
    ),
    "guessing": partial(drafts.write_states, **_GDN_HEADS),
    "mamba2": partial(architectures.write, "nemotron_h", **_MAMBA2),
    "guessing mamba2": partial(drafts.write_mamba2, **_MAMBA2),
    "mamba1": partial(architectures.write, "jamba", **_HEADS),
    "conv": partial(architectures.write, "lfm2", **_HEADS),
    "linear": linear_attention.write,
}
_BY = r"(?:\(\w+ pid=\d+\) )*"
# Pydantic says in the next line what was wrong, and behind that what it was given.
_CAUSE = r"  (?:Value error|Assertion failed), (?P<cause>.+?)(?: \[type=.*)?"
_ERROR = re.compile(rf"^{_BY}(?:\w+\.)*(?P<error>\w*Error: .+)(?:\n{_BY}{_CAUSE})?$", re.MULTILINE)


def engine(kind: str) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for a kind, but for the model."""
    return {**_ENGINE, **KINDS[kind][1]}


def end_of(log: str) -> str:
    """What an engine that has not answered said: its errors, each once, and its last lines.

    With several processes the first one's reason comes long before what the others say of it.
    """
    errors = dict.fromkeys(found[0] for found in _ERROR.finditer(log[:-3000]))
    return "\n".join([*list(errors)[:20], log[-3000:]])


def ended(side: str, log: str) -> dict[str, Any]:
    """An engine that has not answered; that plain vLLM does not is no fault of the tier."""
    if side == "off":
        said = list(_ERROR.finditer(log))
        # Who waited for an engine says that it ended, and its own error says why.
        causes = [one for one in said if "See root cause above" not in one["error"]]
        last = (causes or said or [None])[-1]
        why = (last["cause"] or last["error"])[:300] if last else log[-900:]
        return {"outcome": "skipped", "why": f"plain vLLM ends by itself: {why}"}
    return {"outcome": "failed", "why": f"{side}: {log}"}


def no_numbers(*plain: dict[str, Any]) -> str:
    """Why the answers of plain engines say nothing of the tier; empty if they do.

    Where logits are no numbers, the same token is the likeliest again and again.
    """
    answers = [answer for one in plain for answer in one["lengths_alone"]["tokens"]]
    if any(len(answer) >= STUCK and len(set(answer)) == 1 for answer in answers):
        return "plain vLLM by itself answers prompts with one token over and over"
    return ""


def wrong_alone(off: dict[str, Any], few: dict[str, Any]) -> str:
    """Why answers of plain vLLM, with many blocks and with few, say nothing of the tier.

    Empty if they do.
    """
    answers, again = (one["lengths_alone"]["tokens"] for one in (off, few))
    if answers and not any(a == b for a, b in zip(answers[:ROUND], again)):
        return "plain vLLM by itself answers no prompt alike in two engines, with nothing to find"
    found_again = len(answers) - ROUND
    if found_again <= 0 or _repeated(answers) > ROUND:
        return ""
    return (
        f"plain vLLM by itself answers none of {found_again} prompts as before where it finds "
        "their prefixes"
    )


def one_of(plain: list[Any], its: list[Any]) -> list[Any]:
    """For each of the tier's answers: itself if plain vLLM gave it in some round, or plain's."""
    rounds = [plain[at::ROUND] for at in range(ROUND)]
    return [answer if answer in rounds[at % ROUND] else plain[at] for at, answer in enumerate(its)]


def _repeated(answers: list[Any]) -> int:
    """How many are those of the first round, in which nothing was found."""
    return sum(answer == answers[at % ROUND] for at, answer in enumerate(answers))


def judge(
    off: dict[str, Any],
    on: dict[str, Any],
    few: dict[str, Any],
    scores: dict[str, Any],
    found: dict[str, Any],
    parts: bool = False,
) -> list[bool]:
    """What must hold besides equal answers; what was seen goes to ``found``.

    ``few``: plain vLLM with as few blocks as the engine with the tier. ``scores``: what it computes
    of the answers of these two, see `closeness`. ``parts``: vLLM's own hits end within blocks, so
    they are longer than the tier's, whose prefills begin where a kernel's chunk does: its answers
    must be those of its first round.
    """
    alone = off["lengths_alone"]["cached"], on["lengths_alone"]["cached"]
    first, *others = (side["lengths_alone"]["tokens"][:ROUND] for side in (off, few, on))
    plain, again, tier = off["outgrown"], few["outgrown"], on["outgrown"]
    behind, plain_behind = scores["outgrown_behind_the_best"]["behind"]
    for name, side in (("plain_repeated", off), ("repeated", on)):
        found[name] = _repeated(side["lengths_alone"]["tokens"])
    found.update(
        cached=list(alone),
        first=len(first),
        plain_first_equal=sum(a == b for a, b in zip(first, others[0])),
        first_equal=sum(a == b for a, b in zip(first, others[1])),
        preemptions=tier["preemptions"],
        outgrown=len(plain["tokens"]),
        outgrown_equal=sum(a == b for a, b in zip(plain["tokens"], tier["tokens"])),
        behind=[round(max(answer), 4) for answer in behind],
        plain_behind=[round(max(answer), 4) for answer in plain_behind],
        behind_in_all=round(sum(map(sum, behind)), 4),
        plain_behind_in_all=round(sum(map(sum, plain_behind)), 4),
        held_up=tier["late"],
    )
    return [
        alone[0] > alone[1] > 0 if parts else alone[0] == alone[1] > 0,
        not parts or found["repeated"] == len(on["lengths_alone"]["tokens"]),
        min(tier["preemptions"], again["preemptions"]) > 0,
        plain["preemptions"] == 0,
        *near(found),
        tier["late"] > 0,
    ]


def near(found: dict[str, Any]) -> list[bool]:
    """Whether answers to prompts asked together are as good as those of plain vLLM."""
    return [
        max(found["behind"]) <= max([NEAR, *found["plain_behind"]]),
        found["behind_in_all"] <= MORE * found["plain_behind_in_all"] + BESIDES,
    ]
