"""What the tier calls of vLLM, or stands in for: checked like the others and not wrapped."""

from __future__ import annotations

from kvoffload_patch.patching import PatchPoint

_SCHEDULER = "vllm.v1.core.sched.scheduler"
_POOL = "vllm.v1.core.block_pool"
_MANAGER = "vllm.v1.core.kv_cache_manager"

# Name, module, attribute, leading parameters, return annotation, and why.
_CALLED = (
    (
        "manager.get_computed_blocks",
        _MANAGER,
        "KVCacheManager.get_computed_blocks",
        ("self", "request"),
        "tuple[KVCacheBlocks, int, int]",
        "called over a stand-in pool to find what a request could hit",
    ),
    (
        "pool.get_cached_block",
        _POOL,
        "BlockPool.get_cached_block",
        ("self", "block_hash", "kv_cache_group_ids"),
        "list[KVCacheBlock] | None",
        "the stand-in pool answers in its place",
    ),
    (
        "pool.touch",
        _POOL,
        "BlockPool.touch",
        ("self", "blocks"),
        "None",
        "blocks of a load stay referenced until they are used",
    ),
    (
        "pool.free_blocks",
        _POOL,
        "BlockPool.free_blocks",
        ("self", "ordered_blocks"),
        "None",
        "and are given back",
    ),
    (
        "pool.get_num_free_blocks",
        _POOL,
        "BlockPool.get_num_free_blocks",
        ("self",),
        "int",
        "no more is loaded than this step can admit",
    ),
    (
        "pool.insert_block_hash",
        _POOL,
        "BlockPool._insert_block_hash",
        ("self", "block_hash_with_group_id", "block", "num_tokens"),
        "None",
        "a loaded block enters the GPU's prefix cache",
    ),
    (
        "scheduler.preempt_request",
        _SCHEDULER,
        "Scheduler._preempt_request",
        ("self", "request", "timestamp"),
        "None",
        "what was computed upon a load that failed is computed anew",
    ),
)


def called_points(versions: str, remove_when: str) -> tuple[PatchPoint, ...]:
    """The points without a hook, for these releases."""
    return tuple(
        PatchPoint(
            name=name,
            role="scheduler",
            module=module,
            attribute=attribute,
            hook="",
            versions=versions,
            parameters=parameters,
            returns=(returns,),
            why=why,
            remove_when=remove_when,
        )
        for name, module, attribute, parameters, returns, why in _CALLED
    )
