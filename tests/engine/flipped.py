"""Bits of CPU slots that change between a store and its load.

Of several ranks on the last one, whose result the engine does not get.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

_STORED_S = 1.0  # more than the copies of a quiet engine take


def flipped_bits(stage: Any) -> dict[str, Any]:
    """Prompts, asked again when a bit of each slot of the first half of them is another one.

    Returns: ``tokens``, the answers until the engine has ended; ``ended``, the error that it ended
    with, empty if it has not.
    """
    from scenarios import prompts, tokens_of

    asked, answers, ended = prompts(15, 12, 420), [], ""
    for prompt in asked:
        answers += tokens_of(stage.play([prompt]))
    time.sleep(_STORED_S)
    executor, count = stage.core.model_executor, stage.tier_stats()["stored"] // 2
    if executor.parallel_config.world_size > 1:
        executor.collective_rpc(_flip_on_the_last, args=(count,))
    else:
        _flip(count)
    try:
        for prompt in asked:
            answers += tokens_of(stage.play([prompt]))
    except Exception as error:  # noqa: BLE001 - what it is, is looked at
        ended = f"{type(error).__name__}: {error}"
    return {"tokens": answers, "ended": ended, "tier": stage.tier_stats()}


def _flip_on_the_last(worker: Any, count: int) -> None:
    """Runs on each worker."""
    if worker.rank == worker.vllm_config.parallel_config.world_size - 1:
        _flip(count)


def _flip(count: int) -> None:
    """The highest bit of the exponent of a number that is attended to, in so many slots."""
    tier = "kvoffload_patch.integration.worker.tier"
    if tier not in sys.modules:
        return  # plain vLLM
    ranks = [it for it in gc.get_objects() if isinstance(it, sys.modules[tier].RankTier)]
    assert ranks, "no rank of this process has slots"
    for slots in [rank._host.slots for rank in ranks]:
        slots[:count, slots.shape[1] // 4 * 3 + 257] ^= 0x40
