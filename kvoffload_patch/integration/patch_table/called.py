"""Rows of the table without a hook: functions of vLLM that the tier calls or stands in for."""

from __future__ import annotations

from kvoffload_patch.integration.patch_table.shape import Shape, row

_POOL = "vllm.v1.core.block_pool"
_MANAGER = "vllm.v1.core.kv_cache_manager"
_ANY = ">=0"
_FIND = ("self", "block_hashes", "max_cache_hit_length")


def _called(name: str, module: str, attribute: str, why: str, *shapes: Shape) -> tuple:  # type: ignore[type-arg]
    return row("scheduler", name, (module, attribute), "", why, *shapes)


CALLED = (
    *_called(
        "manager.get_computed_blocks",
        _MANAGER,
        "KVCacheManager.get_computed_blocks",
        "called over a stand-in pool to find what a request could hit",
        Shape("<0.26", ("self", "request"), "tuple[KVCacheBlocks, int]"),
        Shape(">=0.26", ("self", "request"), "tuple[KVCacheBlocks, int, int]"),
    ),
    *_called(
        "coordinator.find_longest_cache_hit",
        "vllm.v1.core.kv_cache_coordinator",
        "KVCacheCoordinator.find_longest_cache_hit",
        "within the former; what it has just found is given to vLLM when it asks again",
        Shape("<0.26", _FIND, "tuple[tuple[list[KVCacheBlock], ...], int]"),
        Shape(">=0.26", _FIND, "tuple[tuple[list[KVCacheBlock], ...], int, int]"),
    ),
    *_called(
        "manager.get_block_ids",
        _MANAGER,
        "KVCacheManager.get_block_ids",
        "what was computed upon blocks that a connector failed to load is behind them in its list",
        Shape(_ANY, ("self", "request_id"), "tuple[list[int], ...]"),
    ),
    *_called(
        "pool.get_cached_block",
        _POOL,
        "BlockPool.get_cached_block",
        "the stand-in pool answers in its place",
        Shape(
            "<0.11.1",
            ("self", "block_hash", "kv_cache_group_ids"),
            "Optional[list[KVCacheBlock]]",
        ),
        Shape(
            ">=0.11.1",
            ("self", "block_hash", "kv_cache_group_ids"),
            "list[KVCacheBlock] | None",
        ),
    ),
    *_called(
        "pool.touch",
        _POOL,
        "BlockPool.touch",
        "blocks of a load stay referenced until they are used",
        Shape(_ANY, ("self", "blocks"), "None"),
    ),
    *_called(
        "pool.free_blocks",
        _POOL,
        "BlockPool.free_blocks",
        "and are given back",
        Shape(_ANY, ("self", "ordered_blocks"), "None"),
    ),
    *_called(
        "pool.get_num_free_blocks",
        _POOL,
        "BlockPool.get_num_free_blocks",
        "no more is loaded than this step can admit",
        Shape(_ANY, ("self",), "int"),
    ),
    *_called(
        "pool.hash_map_insert",
        _POOL,
        "BlockHashToBlockMap.insert",
        "up to 0.23 a loaded block enters the GPU's prefix cache by it, up to 0.10 by a plain dict",
        Shape("<0.11", None),
        Shape(">=0.11", ("self", "key", "block"), "None"),
    ),
    *_called(
        "pool.insert_block_hash",
        _POOL,
        "BlockPool._insert_block_hash",
        "a loaded block enters the GPU's prefix cache",
        Shape("<0.24", None),
        Shape(">=0.24", ("self", "block_hash_with_group_id", "block", "num_tokens"), "None"),
    ),
    *_called(
        "hashes.make_key",
        "vllm.v1.core.kv_cache_utils",
        "make_block_hash_with_group_id",
        "a block's key in the pool; up to 0.10.1 it is a named tuple",
        Shape("<0.10.2", None),
        Shape(">=0.10.2", ("block_hash", "group_id"), "BlockHashWithGroupId"),
    ),
)
