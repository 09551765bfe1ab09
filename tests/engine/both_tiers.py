"""Prompts that come back in part from the tier, and in part by a KV connector."""

from __future__ import annotations

from typing import Any


def hits_of_both(stage: Any) -> dict[str, Any]:
    """As `singles`; and for how many prompts both the tier and a KV connector loaded blocks."""
    from scenarios import prompts, tokens_of

    asked, answers, both = prompts(14, 12, 420), [], 0
    for prompt in 3 * asked:
        before = stage.tier_stats()["loaded"], stage.loaded_tokens()
        answers += tokens_of(stage.play([prompt]))
        # With a connector, vLLM's count is the connector's alone.
        after = stage.tier_stats()["loaded"], stage.loaded_tokens()
        both += before[0] < after[0] and before[1] < after[1]
    return {"tokens": answers, "both": both, "tier": stage.tier_stats()}
