"""What an engine and its tier hold when nobody asks any more: nothing."""

from __future__ import annotations

from typing import Any


def left_behind(stage: Any) -> list[str]:
    """A line for each thing; none if all is as it should be."""
    found = _of_vllm(stage.core.scheduler)
    if stage.tier is None:
        return found
    if stage.breaker.detached:
        return [*found, f"the tier is detached: {stage.breaker.failure}"]
    return found + of_the_tier(stage.tier)


def _of_vllm(scheduler: Any) -> list[str]:
    pool = scheduler.kv_cache_manager.block_pool
    used = [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null]
    queue = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    free = {
        "blocks that somebody refers to": used,
        "blocks that are twice in the free queue": len(queue) - len(set(queue)),
        "blocks that are not free": len(pool.blocks) - 1 - pool.get_num_free_blocks(),
        "blocks not in the free queue": len(pool.blocks) - 1 - len(queue),
        "requests": list(scheduler.requests),
    }
    return _said(free)


def of_the_tier(tier: Any) -> list[str]:
    """The same of a `SchedulerTier` alone."""
    manager, loads = tier._manager, tier._loads
    own = ("_parked", "under_way", "_by_ticket", "arriving", "ticket_of")
    names = (*own, "readers", "_held", "_at_risk")
    return _said({
        "slots without a key": manager.num_used - len(manager._slot_of),
        "copies": manager.busy,
        "holds": [name for name, held in vars(manager._held).items() if held],
        "hits": tier._hits._looked_up,
        "lookups": [*tier._lookups._new, *tier._lookups._results],
        "what was used": tier._recency.used,
        # What the GPU has waits for slots while more are to come.
        "stores of a step that is over": () if manager.growing else manager._queue,
        "prefills": tier._view.prefills,
        "blocks said to be cached": tier.cached,
        # The last one stays until another output is taken in.
        "steps beside a connector": list(tier._invalid._in_flight)[1:],
        **{f"loads, {name}": getattr(loads, name) for name in names},
    })  # fmt: skip


def _said(counts: dict[str, Any]) -> list[str]:
    return [f"{name}: {count}" for name, count in counts.items() if count]
