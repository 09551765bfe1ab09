"""Hooks on vLLM's EngineCore, Scheduler and BlockPool. Without a tier each calls on at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvoffload_patch.integration.engine.attach import attach, detach, refuse_v0
from kvoffload_patch.integration.protocol import attached

Wrapped = Callable[..., Any]


def init(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> None:
    """`EngineCore.__init__`: when it returns, executor, KV caches and scheduler exist."""
    wrapped(*args, **kwargs)
    attach(instance, instance.vllm_config)


def init_v0(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> None:
    """`LLMEngine.__init__` of the engine before V1, which 0.10 still has.

    With VLLM_USE_V1=1 that name stands for V1's class.
    """
    if any(c.__module__ == "vllm.engine.llm_engine" for c in type(instance).__mro__):
        refuse_v0()
    wrapped(*args, **kwargs)


def shutdown(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """`EngineCore.shutdown`: before it, the workers still answer."""
    try:
        detach(instance)
    finally:
        result = wrapped(*args, **kwargs)
    return result


def schedule(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """`Scheduler.schedule`: loads are decided before it, the plan rides on what it returns."""
    tier = attached(instance)
    if tier is None:
        return wrapped(*args, **kwargs)
    tier.before_schedule()
    try:
        output = wrapped(*args, **kwargs)
    finally:
        tier.schedule_returned()
    tier.after_schedule(output)
    return output


def update_from_output(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """`Scheduler.update_from_output`: the reporting rank's result comes back on its output."""
    tier = attached(instance)
    if tier is not None:
        tier.on_output(*_outputs(*args, **kwargs))
    return wrapped(*args, **kwargs)


def finish_requests(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """`Scheduler.finish_requests`: it removes a request from the queue its status names."""
    tier = attached(instance)
    if tier is None:
        return wrapped(*args, **kwargs)
    request_ids, status = _finish_args(*args, **kwargs)
    tier.on_finish(request_ids)
    return wrapped(request_ids, status)


def reset_prefix_cache(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """`Scheduler.reset_prefix_cache`: references held by the tier would make it fail."""
    tier = attached(instance)
    if tier is not None:
        tier.reset()
    return wrapped(*args, **kwargs)


def cache_full_blocks(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """`BlockPool.cache_full_blocks`: exactly the newly full blocks, for every KV cache group."""
    return _cache(_newly_full, wrapped, instance, args, kwargs)


def cache_full_blocks_with_hashes(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """`BlockPool.cache_full_blocks` up to 0.10.0, which is given the hashes as well."""
    return _cache(_newly_full_with_hashes, wrapped, instance, args, kwargs)


def _cache(newly_full: Wrapped, wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    tier = attached(instance)
    if tier is not None:
        tier.on_cached(*newly_full(*args, **kwargs))
    return result


def get_new_blocks(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """`BlockPool.get_new_blocks`: the one place where a GPU block is handed out."""
    blocks = wrapped(*args, **kwargs)
    tier = attached(instance)
    if tier is not None:
        tier.on_new_blocks(blocks)
    return blocks


def evict_blocks(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """`BlockPool.evict_blocks`: a connector failed to fill blocks that are cached already."""
    tier = attached(instance)
    if tier is not None:
        tier.on_invalid(_block_ids(*args, **kwargs))
    return wrapped(*args, **kwargs)


def invalid_blocks(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """`Scheduler._handle_invalid_blocks`, 0.11.1 to 0.12: the same, said to the scheduler."""
    tier = attached(instance)
    if tier is not None:
        tier.on_invalid(_invalid_ids(*args, **kwargs))
    return wrapped(*args, **kwargs)


def update_waiting(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """`Scheduler._update_waiting_for_remote_kv` up to 0.17: what is parked is no connector's."""
    tier = attached(instance)
    if tier is not None and tier.is_parked(_request(*args, **kwargs)):
        return False
    return wrapped(*args, **kwargs)


def _request(request: Any) -> Any:
    return request


def _invalid_ids(invalid_block_ids: Iterable[int]) -> Iterable[int]:
    return invalid_block_ids


def _block_ids(block_ids: Iterable[int]) -> Iterable[int]:
    return block_ids


def _outputs(scheduler_output: Any, model_runner_output: Any) -> tuple[Any, Any]:
    return scheduler_output, model_runner_output


def _finish_args(request_ids: Any, finished_status: Any) -> tuple[list[str] | None, Any]:
    if isinstance(request_ids, str):
        return [request_ids], finished_status
    return (None if request_ids is None else list(request_ids)), finished_status


def _newly_full(
    request: Any,
    blocks: list[Any],
    num_cached_blocks: int,
    num_full_blocks: int,
    *_: Any,
    **__: Any,
) -> tuple[Any, Iterable[Any]]:
    return request, blocks[num_cached_blocks:num_full_blocks]


def _newly_full_with_hashes(
    request: Any, blocks: list[Any], block_hashes: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Iterable[Any]]:
    return _newly_full(request, blocks, *args, **kwargs)
