"""Requests that need three times the GPU's cache, and what of them is computed twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 24, 360, 40


def under_pressure(stage: Any) -> dict[str, Any]:
    """Give them all at once. None begin alike, so what is found was preempted before."""
    from scenarios import prompts, tokens_of

    pool = stage.core.scheduler.kv_cache_manager.block_pool
    loaded, before = stage.tier_stats()["loaded"], stage.counter("vllm:num_preemptions")
    with _scheduled(stage.core.scheduler) as steps:
        outputs = stage.play(prompts(17, PROMPTS, PROMPT_TOKENS), max_tokens=ANSWER_TOKENS)
    needed = PROMPTS * (PROMPT_TOKENS + ANSWER_TOKENS - 1)  # the last token is not computed
    return {
        "tokens": tokens_of(outputs),
        "times_the_cache": needed / stage.block_size / (pool.num_gpu_blocks - 1),
        "preemptions": stage.counter("vllm:num_preemptions") - before,
        "recomputed": sum(steps) - needed,
        "loaded_tokens": (stage.tier_stats()["loaded"] - loaded) * stage.block_size,
    }


@contextmanager
def _scheduled(scheduler: Any) -> Iterator[list[int]]:
    """The tokens of each step that is scheduled meanwhile."""
    schedule, tokens = scheduler.schedule, list[int]()
    own = "schedule" in vars(scheduler)

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        tokens.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = counted
    try:
        yield tokens
    finally:
        if own:
            scheduler.schedule = schedule
        else:
            del scheduler.schedule
