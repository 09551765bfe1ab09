"""Keys of parts of blocks, which vLLM gives within a step beside those of whole ones.

It gives the state behind a prompt's last unit its key in the same way, also where that is at the
end of a block: such a block is whole, and stored as any other.
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
        whole: told of each whole block that gets its key so: its request, the block, how many
            tokens end with it, and tokens of a block.
        failed: told where something has failed, and how, while vLLM gives a key.
    """

    whole: Callable[[Any, Any, int, int], object]
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

    def _cache(
        self,
        request: Any,
        block: Any,
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
        **kwargs: Any,
    ) -> Any:
        about = num_tokens, kv_cache_group_id, block_size
        try:
            before = self._keys(block)
        except Exception as error:  # noqa: BLE001 - whatever it is, vLLM goes on
            self.failed("cache_partial_block", error)
            return self._wrapped(request, block, *about, **kwargs)
        key = self._wrapped(request, block, *about, **kwargs)
        if key is not None and key not in before:
            self._new.append((request.request_id, block, key))
            if num_tokens % block_size == 0 and key == block.block_hash:
                self._note_whole(request, block, num_tokens, block_size)
        return key

    def _note_whole(self, *about: Any) -> None:
        try:
            self.whole(*about)
        except Exception as error:  # noqa: BLE001 - whatever it is, vLLM has given the key
            self.failed("cache_partial_block", error)

    def _keys(self, block: Any) -> tuple[Any, ...]:
        return block.block_hash, *self._pool.cached_block_hashes_by_block.get(block.block_id, ())
