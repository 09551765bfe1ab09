"""Prompts that come back in part from the tier, and in part by a KV connector."""

from __future__ import annotations

from typing import Any


def hits_of_both(stage: Any) -> dict[str, Any]:
    """As `singles`; and for how many prompts both the tier and a KV connector loaded blocks.

    The second round goes from the newest prompt to the oldest. Where the GPU holds fewer prompts
    than the tier, and the tier not all, it meets one whose last blocks alone the tier has evicted.
    """
    from scenarios import prompts, tokens_of

    asked, answers, both = prompts(14, 12, 420), [], 0
    brought = _tokens_brought(stage.core.scheduler.connector)
    for prompt in [*asked, *reversed(asked), *asked]:
        before = stage.tier_stats()["loaded"], sum(brought)
        answers += tokens_of(stage.play([prompt]))
        after = stage.tier_stats()["loaded"], sum(brought)
        both += before[0] < after[0] and before[1] < after[1]
    return {"tokens": answers, "both": both, "brought": sum(brought), "tier": stage.tier_stats()}


def brought_and_kept(stage: Any) -> dict[str, Any]:
    """A KV connector has all prompts and the tier none; then the GPU loses them, twice.

    The first answers are behind what the connector brings, the second behind what the tier has
    stored of that. Plain vLLM without a connector finds all of it on its GPU.
    """
    from scenarios import prompts, tokens_of

    asked, answers, connector = prompts(14, 12, 420), [], stage.core.scheduler.connector
    for prompt in asked:
        stage.play([prompt], max_tokens=1)
    if connector is not None:
        stage.llm.reset_prefix_cache()
    counted, brought = _tokens_brought(connector), []
    for turn in range(2):
        for prompt in asked:
            answers += tokens_of(stage.play([prompt]))
        brought.append(sum(counted) - sum(brought))
        if connector is not None:
            stage.push_out(140 + turn)
    return {"tokens": answers, "brought": brought, "tier": stage.tier_stats()}


def _tokens_brought(connector: Any) -> list[int]:
    """A list to which each request that is admitted adds the tokens that the connector has for it.

    vLLM counts them, too, but LMCache leaves its counters nothing to show.
    """
    brought: list[int] = []
    if connector is not None:
        admitted = connector.update_state_after_alloc

        def counted(request: Any, blocks: Any, tokens: int, *more: Any) -> Any:
            brought.append(tokens)
            return admitted(request, blocks, tokens, *more)

        connector.update_state_after_alloc = counted
    return brought
