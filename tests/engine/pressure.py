"""Requests that need three times the GPU's cache, and what of them is computed twice."""

from __future__ import annotations

from typing import Any

from scripts.bench.serve.pressure import scheduled

PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 24, 360, 40


def under_pressure(stage: Any) -> dict[str, Any]:
    """Give them all at once. None begin alike, so what is found was preempted before."""
    from scenarios import prompts, tokens_of

    pool = stage.core.scheduler.kv_cache_manager.block_pool
    loaded, before = stage.tier_stats()["loaded"], stage.counter("vllm:num_preemptions")
    with scheduled(stage.core.scheduler) as steps:
        outputs = stage.play(prompts(17, PROMPTS, PROMPT_TOKENS), max_tokens=ANSWER_TOKENS)
    needed = PROMPTS * (PROMPT_TOKENS + ANSWER_TOKENS - 1)  # the last token is not computed
    return {
        "tokens": tokens_of(outputs),
        "times_the_cache": needed / stage.block_size / (pool.num_gpu_blocks - 1),
        "preemptions": stage.counter("vllm:num_preemptions") - before,
        "recomputed": sum(steps) - needed,
        "loaded_tokens": (stage.tier_stats()["loaded"] - loaded) * stage.block_size,
    }
