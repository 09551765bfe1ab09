"""Prompts that come back in turns, of which a GPU that keeps whole ones has lost each by then."""

from __future__ import annotations

from typing import Any

TIMES = 10


def in_turns(stage: Any) -> dict[str, Any]:
    """Twelve prompts in rotation, by two; what was loaded each time, and what the GPU keeps."""
    from scenarios import prompts, tokens_of

    asked, answers, loaded = prompts(17, 12, 420), [], []
    for _ in range(TIMES):
        before = stage.tier_stats()["loaded"]
        for at in range(0, len(asked), 2):
            answers += tokens_of(stage.play(asked[at : at + 2]))
        loaded.append(stage.tier_stats()["loaded"] - before)
    share = stage.tier.gpu_share if stage.tier else 1.0
    return {"tokens": answers, "loaded": loaded, "share": share}


def singles(stage: Any) -> dict[str, Any]:
    """Twelve prompts in rotation, three times, each asked alone: they push each other out."""
    from scenarios import prompts, tokens_of

    asked, answers = prompts(14, 12, 420), []
    for prompt in 3 * asked:
        answers += tokens_of(stage.play([prompt]))
    return {"tokens": answers, "tier": stage.tier_stats()}
