"""Hits of an engine whose bus is fast, and then slower than it computes."""

from __future__ import annotations

from typing import Any

# Times of the CPU's copies: a block then takes longer than any prefill.
SLOWER_TIMES = 1e6


def slow_bus(stage: Any) -> dict[str, Any]:
    """Prompts that the GPU has lost, asked again while loads are fast, and while they are slow.

    What a token takes to compute is what the engine's own steps have measured.
    """
    from scenarios import prompts, tokens_of

    asked, answers, moved = prompts(15, 3, 420), [], []
    for turn in range(3):
        if turn == 2 and stage.tier is not None:
            stage.tier.pace.loads_take(SLOWER_TIMES)
            # Results that say otherwise come back meanwhile.
            stage.tier.pace.loads_take = lambda slowdown: None
        for prompt in asked:
            answers += tokens_of(stage.play([prompt]))
        stage.push_out(160 + turn)
        if stage.tier is not None:
            counts = stage.tier.counts()
            moved.append((counts.hit, counts.spared))
    ms_per_token = stage.tier.pace.ms_per_token if stage.tier is not None else 0.0
    return {"tokens": answers, "moved": moved, "ms_per_token": ms_per_token}
