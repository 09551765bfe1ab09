"""How a block enters and leaves vLLM's prefix cache, release by release.

By feature: up to 0.10.1 a key is a named tuple; up to 0.10 the cache is a dict of dicts, up to
0.23 a map with `insert`, later a method of the pool; from 0.9.1 to 0.13 `touch` takes blocks by
KV cache group.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

Publish = Callable[[Hashable, Any, int], None]


class PoolAdapter:
    """One vLLM block pool.

    Args:
        pool: a `vllm.v1.core.block_pool.BlockPool`.

    It counts the references that it takes and gives back, so that `free_all` knows what is left
    whatever has become of those who held them.

    Attributes:
        publish: put a block into the prefix cache: (key, block, tokens of the prefix that ends
            with it).
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        by_group = "tuple" in str(inspect.signature(pool.touch).parameters["blocks"].annotation)
        self._touch: Callable[[Sequence[Any]], None] = (
            self._touch_one_group if by_group else pool.touch
        )
        # References taken and given back, by GPU block id.
        self._taken: Counter[int] = Counter()
        self._freed: Counter[int] = Counter()
        self.publish = self._publisher()

    def hold(self, blocks: Sequence[Any]) -> None:
        """Reference cached GPU blocks."""
        self._touch(blocks)
        self._taken.update([block.block_id for block in blocks])

    def take(self, count: int) -> list[Any]:
        """Fresh GPU blocks, referenced."""
        blocks = list(self._pool.get_new_blocks(count))
        self._taken.update([block.block_id for block in blocks])
        return blocks

    def free(self, blocks: Iterable[Any]) -> None:
        """Give references up; the blocks given first are evicted first.

        From 0.10 to 0.23 vLLM counts all of a call's references down first, and then puts every
        block without any into its queue: one that was given twice, twice. So each goes once in a
        call, with its last reference in the last one.
        """
        left = list(blocks)
        ids = [block.block_id for block in left]
        self._freed.update(ids)
        self._free(left, len(set(ids)) < len(left))

    def free_all(self) -> None:
        """Give back every reference that was taken and not given back."""
        held = self._taken - self._freed
        self._taken.clear()
        self._freed.clear()
        by_id = self._pool.blocks
        self._free([by_id[block_id] for block_id in held.elements()], True)

    def _free(self, blocks: list[Any], repeated: bool) -> None:
        if repeated:
            blocks, again = _split(blocks)
            if again:
                self._free(again, True)
        self._pool.free_blocks(blocks)

    def _touch_one_group(self, blocks: Sequence[Any]) -> None:
        self._pool.touch((blocks,))

    def _publisher(self) -> Publish:
        if hasattr(self._pool, "_insert_block_hash"):
            return self._insert_hash
        # Asked for each time: a reset puts another object in its place.
        mapped = hasattr(self._pool.cached_block_hash_to_block, "insert")
        return self._insert_into_map if mapped else self._insert_into_dict

    def _insert_hash(self, key: Hashable, block: Any, num_tokens: int) -> None:
        self._pool._insert_block_hash(key, block, num_tokens=num_tokens)

    def _insert_into_map(self, key: Hashable, block: Any, _: int) -> None:
        block.block_hash = key
        self._pool.cached_block_hash_to_block.insert(key, block)

    def _insert_into_dict(self, key: Hashable, block: Any, _: int) -> None:
        block.block_hash = key
        self._pool.cached_block_hash_to_block[key][block.block_id] = block


def key_maker() -> Callable[[Any, int], Hashable]:
    """A block's key in the pool, of its hash and its KV cache group."""
    from vllm.v1.core import kv_cache_utils

    made: Callable[[Any, int], Hashable] | None = getattr(
        kv_cache_utils, "make_block_hash_with_group_id", None
    )
    if made is None:
        made = kv_cache_utils.BlockHashWithGroupId
    return made


def _split(blocks: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Each block once, and what is left of them, both in order."""
    seen: set[int] = set()
    once: list[Any] = []
    again: list[Any] = []
    for block in blocks:
        (again if block.block_id in seen else once).append(block)
        seen.add(block.block_id)
    return once, again
