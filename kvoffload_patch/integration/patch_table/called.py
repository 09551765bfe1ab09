"""Rows of the table without a hook: functions of vLLM that the tier calls or stands in for."""

from __future__ import annotations

from kvoffload_patch.integration.patch_table.shape import Shape, row
from kvoffload_patch.patching import PatchPoint

_POOL = "vllm.v1.core.block_pool"
_MANAGER = "vllm.v1.core.kv_cache_manager"
_ANY = ">=0"
_RPC = ("self", "method", "timeout", "args")
_FIND = ("self", "block_hashes", "max_cache_hit_length")


def _called(
    name: str, module: str, attribute: str, why: str, *shapes: Shape, exact: bool = False
) -> tuple[PatchPoint, ...]:
    return row(name, (module, attribute), "", why, *shapes, exact=exact)


def _find_hit(name: str, owner: str) -> tuple[PatchPoint, ...]:
    return _called(
        name,
        "vllm.v1.core.kv_cache_coordinator",
        f"{owner}.find_longest_cache_hit",
        "within get_computed_blocks, over the stand-in pool",
        Shape("<0.26", _FIND, "tuple[tuple[list[KVCacheBlock], ...], int]"),
        Shape(">=0.26", _FIND, "tuple[tuple[list[KVCacheBlock], ...], int, int]"),
        exact=True,
    )


def _queue(name: str, attribute: str, parameter: str) -> tuple[PatchPoint, ...]:
    return _called(
        name,
        "vllm.v1.core.sched.request_queue",
        attribute,
        "from 0.31 on a parked request that is ready returns to where others wait",
        Shape("<0.9.2", None),
        Shape(">=0.9.2", ("self", parameter), "None"),
    )


def _rpc(name: str, older: str, module: str, owner: str, *shapes: Shape) -> tuple[PatchPoint, ...]:
    return _called(
        name,
        module,
        f"{owner}.collective_rpc",
        "every rank is asked for its geometry, opened, drained and closed",
        *(s._replace(target=(older, f"{owner}.collective_rpc")) for s in shapes[:1]),
        *shapes[1:],
    )


def _experts(name: str, why: str, returns: str, *parameters: str) -> tuple[PatchPoint, ...]:
    return _called(
        f"experts.{name}",
        "vllm.distributed.aux_output_connector.connector",
        f"AuxOutputSchedulerConnector.{name}",
        why,
        Shape("<0.33", None),
        Shape(">=0.33", ("self", *parameters), returns),
    )


_SPAN = ("span_name", "start_time", "end_time", "attributes", "context")

CALLED = (
    *_called(
        "tracing.instrument_manual",
        "vllm.tracing",
        "instrument_manual",
        "a request's span, where vLLM's tracing is on; up to 0.15 an engine core has no tracer",
        Shape("<0.16", None),
        Shape(">=0.16", (*_SPAN, "kind")),
    ),
    *_called(
        "tracing.extract_trace_context",
        "vllm.tracing.otel",
        "extract_trace_context",
        "the trace that a span belongs to",
        Shape("<0.16", None),
        Shape(">=0.16", ("headers",), "Context | None"),
    ),
    *_called(
        "manager.get_computed_blocks",
        _MANAGER,
        "KVCacheManager.get_computed_blocks",
        "called over a stand-in pool to find what a request could hit",
        Shape("<0.26", ("self", "request"), "tuple[KVCacheBlocks, int]"),
        Shape(">=0.26", ("self", "request"), "tuple[KVCacheBlocks, int, int]"),
    ),
    *_find_hit("coordinator.find_longest_cache_hit", "KVCacheCoordinator"),
    *_find_hit("coordinator.unitary", "UnitaryKVCacheCoordinator"),
    *_find_hit("coordinator.hybrid", "HybridKVCacheCoordinator"),
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
        "the stand-in pool stands in for it",
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
        exact=True,
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
        "pool.evict_cached_block",
        _POOL,
        "BlockPool._maybe_evict_cached_block",
        "keys of blocks that hold something else are taken out of the prefix cache",
        Shape(_ANY, ("self", "block"), "bool"),
    ),
    *_called(
        "pool.get_num_free_blocks",
        _POOL,
        "BlockPool.get_num_free_blocks",
        "no more is loaded than this step can admit",
        Shape(_ANY, ("self",), "int"),
    ),
    *_called(
        "pool.queue_remove",
        "vllm.v1.core.kv_cache_utils",
        "FreeKVCacheBlockQueue.remove",
        "tails that the tier has are handed out before what was used less recently",
        Shape(_ANY, ("self", "block"), "None"),
    ),
    *_called(
        "pool.queue_prepend",
        "vllm.v1.core.kv_cache_utils",
        "FreeKVCacheBlockQueue.prepend_n",
        "and put there",
        Shape("<0.23", None),
        Shape(">=0.23", ("self", "blocks"), "None"),
    ),
    *_called(
        "pool.hash_map_insert",
        _POOL,
        "BlockHashToBlockMap.insert",
        "a loaded block enters the GPU's prefix cache by it, up to 0.10 by a plain dict",
        Shape("<0.11", None),
        Shape(">=0.11", ("self", "key", "block"), "None"),
    ),
    *_called(
        "pool.hash_map_get",
        _POOL,
        "BlockHashToBlockMap.get_one_block",
        "where the GPU has a block, up to 0.10 by a plain dict",
        Shape("<0.11", None),
        Shape(">=0.11,<0.11.1", ("self", "key"), "Optional[KVCacheBlock]"),
        Shape(">=0.11.1", ("self", "key"), "KVCacheBlock | None"),
    ),
    *_called(
        "block.set_block_hash",
        "vllm.v1.core.kv_cache_utils",
        "KVCacheBlock.set_block_hash",
        "a loaded block is given its key, up to 0.23 by a property",
        Shape("<0.24", None),
        Shape(">=0.24", ("self", "block_hash", "num_tokens"), "None"),
    ),
    *_called(
        "pool.insert_block_hash",
        _POOL,
        "BlockPool._insert_block_hash",
        "a loaded block enters the GPU's prefix cache as by this: its key is set, and mapped",
        Shape("<0.24", None),
        Shape(">=0.24", ("self", "block_hash_with_group_id", "block", "num_tokens"), "None"),
    ),
    *_called(
        "pool.cache_partial_block",
        _POOL,
        "BlockPool.cache_partial_block",
        "keys of parts that no step computes are taken out of the prefix cache",
        Shape("<0.24", None),
        Shape(
            ">=0.24",
            ("self", "request", "block", "num_tokens", "kv_cache_group_id", "block_size"),
            "BlockHashWithGroupId | None",
        ),
    ),
    *_called(
        "hashes.make_key",
        "vllm.v1.core.kv_cache_utils",
        "make_block_hash_with_group_id",
        "a block's key in the pool; up to 0.10.1 it is a named tuple",
        Shape("<0.10.2", None),
        Shape(">=0.10.2", ("block_hash", "group_id"), "BlockHashWithGroupId"),
    ),
    *_called(
        "stats.record",
        "vllm.v1.metrics.stats",
        "PrefixCacheStats.record",
        "hits in the tier are counted as those of an external prefix cache",
        Shape("<0.11.1", None),
        Shape(">=0.11.1", ("self", "num_tokens", "num_hits", "preempted"), "None"),
    ),
    *_experts("max_cache_hit", "a hit is cut to what has such records", "int", "request"),
    *_experts(
        "request_loading", "those of a parked request are kept", "None", "request", "num_tokens"
    ),
    *_queue("queue.prepend", "FCFSRequestQueue.prepend_request", "request"),
    *_queue("queue.remove", "FCFSRequestQueue.remove_requests", "requests"),
    *_queue("priority_queue.prepend", "PriorityRequestQueue.prepend_request", "request"),
    *_queue("priority_queue.remove", "PriorityRequestQueue.remove_requests", "requests"),
    *_rpc(
        "executor.uniproc",
        "vllm.executor.uniproc_executor",
        "vllm.v1.executor.uniproc_executor",
        "UniProcExecutor",
        Shape("<0.11.1", _RPC, "List[Any]"),
        Shape(">=0.11.1,<0.13", _RPC, "Any | list[Any] | Future[Any | list[Any]]"),
        Shape(">=0.13", _RPC, "Any"),
    ),
    *_rpc(
        "executor.multiproc",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.executor.multiproc_executor",
        "MultiprocExecutor",
        Shape("<0.11.1", _RPC, "list[Any]"),
        Shape(">=0.11.1,<0.13", _RPC, "Any | list[Any] | Future[Any | list[Any]]"),
        Shape(">=0.13", _RPC, "Any"),
    ),
    *_called(
        "graphs.mixed_mode",
        "vllm.config.compilation",
        "CUDAGraphMode.mixed_mode",
        "loads come by layer only if prefills are no full CUDA graphs",
        Shape("<0.10.1", None),
        Shape(">=0.10.1", ("self",), "CUDAGraphMode"),
    ),
)
