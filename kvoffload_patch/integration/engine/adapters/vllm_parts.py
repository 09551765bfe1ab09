"""Keys of parts of blocks, which vLLM gives within a step beside those of whole ones.

Beside drafts it gives a whole state its key so, too, which the tier is not told of: it is computed
again. Drafts beside hits within a block are refused by default.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from typing import Any


class PartKeys:
    """Takes keys back that no step computes the bytes of; where hits may end within a block.

    A request that was scheduled can be preempted within the same `schedule`. vLLM leaves the keys
    that it got in its prefix cache, and the next request that hits them reads what was there
    before. Those of whole blocks `StoreChoice` takes out.

    Args:
        pool: a `vllm.v1.core.block_pool.BlockPool`.
        undo: takes what gives the pool its own function back.

    Attributes:
        failed: told where something has failed, and how, while vLLM gives a key.
    """

    failed: Callable[[str, Exception], object]

    def __init__(self, pool: Any, undo: list[Callable[[], None]]) -> None:
        self._pool = pool
        self._wrapped = pool.cache_partial_block
        self._new: list[tuple[str, Any, Any]] = []  # request, block, key
        pool.cache_partial_block = self._cache
        undo.append(partial(delattr, pool, "cache_partial_block"))

    def step_over(self, scheduled: Container[str]) -> None:
        """`schedule` has returned with these requests, or raised."""
        for request_id, block, key in self._new:
            if request_id not in scheduled and not block.ref_cnt and key in self._keys(block):
                self._pool._maybe_evict_cached_block(block)
        self._new.clear()

    def _cache(self, request: Any, block: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            before = self._keys(block)
        except Exception as error:  # noqa: BLE001 - whatever it is, vLLM goes on
            self.failed("cache_partial_block", error)
            return self._wrapped(request, block, *args, **kwargs)
        key = self._wrapped(request, block, *args, **kwargs)
        if key is not None and key not in before:
            self._new.append((request.request_id, block, key))
        return key

    def _keys(self, block: Any) -> tuple[Any, ...]:
        return block.block_hash, *self._pool.cached_block_hashes_by_block.get(block.block_id, ())
