"""How a block enters and leaves vLLM's prefix cache, release by release.

By feature: up to 0.9.2 the queue of free blocks ends with None, later with a block that is none;
up to 0.10.1 a key is a named tuple; up to 0.10 the cache is a dict of dicts, up to 0.23 a map with
`insert`, later a method of the pool; from 0.9.1 to 0.13 `touch` takes blocks by KV cache group, and
from 0.12 on it tells vLLM's metrics of residency, if they are on.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import repeat
from operator import add
from typing import Any


class NoBlocks(Exception):
    """There are fewer GPU blocks than were counted; nothing was taken."""


class PoolAdapter:
    """One vLLM block pool.

    Args:
        pool: a `vllm.v1.core.block_pool.BlockPool`.

    Attributes:
        elastic: whether a block that nobody references can lose its memory.
        on_publish: told of the keys of blocks that entered the prefix cache.
        in_order: whether blocks are handed out in an order that `hand_out_first` changes.

    It counts the references that it takes and gives back, so that `free_all` knows what is left
    whatever has become of those who held them.
    """

    elastic: bool = False

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        by_group = "tuple" in str(inspect.signature(pool.touch).parameters["blocks"].annotation)
        self._touch: Callable[[Sequence[Any]], None] = (
            self._touch_one_group if by_group else pool.touch
        )
        self.on_publish: Callable[[list[Hashable]], None] | None = None
        # References taken and given back, by GPU block id.
        self._taken: Counter[int] = Counter()
        self._freed: Counter[int] = Counter()
        self._num_held = 0  # references
        queue = getattr(pool, "free_block_queue", None)  # kvcached's pool has none
        self.in_order = hasattr(queue, "fake_free_list_head")

    def hold(self, blocks: Sequence[Any]) -> None:
        """Reference cached GPU blocks."""
        collector = getattr(self._pool, "metrics_collector", None)
        if collector is None:
            self._touch(blocks)
        else:  # of how long blocks are used and idle: the tier's references are no use of them
            self._pool.metrics_collector = None
            try:
                self._touch(blocks)
            finally:
                self._pool.metrics_collector = collector
        self._taken.update([block.block_id for block in blocks])
        self._num_held += len(blocks)

    def take(self, count: int) -> list[Any]:
        """Fresh GPU blocks, referenced.

        Raises:
            NoBlocks: there are not so many.
        """
        free = self._pool.get_num_free_blocks()
        if count > free:
            raise NoBlocks(f"expected {count} free GPU blocks, found {free}")
        blocks = list(self._pool.get_new_blocks(count))
        self._taken.update([block.block_id for block in blocks])
        self._num_held += count
        return blocks

    def disclaim(self, scheduled: Any) -> None:
        """Take back what a step is told of blocks that all running requests begin with.

        Up to 0.31 vLLM tells it by their references, which may be the tier's, and a model runner
        may read such blocks once for all requests of a step (cascade attention).

        Args:
            scheduled: vLLM's `SchedulerOutput`, before anything is given back.
        """
        if self._num_held:
            scheduled.num_common_prefix_blocks = [0] * len(scheduled.num_common_prefix_blocks)

    def publish(self, keys: Sequence[Hashable], ends: Sequence[int], blocks: Sequence[Any]) -> None:
        """Put fresh blocks into the prefix cache.

        Args:
            keys: of the blocks.
            ends: tokens of the prefix that ends with each.
            blocks: which hold them, or will when they are read.
        """
        self._publish(keys, ends, blocks)
        if self.on_publish is not None:
            self.on_publish(list(keys))

    def free(self, blocks: Iterable[Any]) -> None:
        """Give references up; the blocks given first are evicted first.

        From 0.10 to 0.23 vLLM counts all of a call's references down first, and then puts every
        block without any into its queue: one that was given twice, twice. So each goes once in a
        call, with its last reference in the last one.
        """
        left = list(blocks)
        self._free(left, len({block.block_id for block in left}) < len(left))

    def free_all(self) -> None:
        """Give back every reference that was taken and not given back."""
        held = self._taken - self._freed
        by_id = self._pool.blocks
        self._free([by_id[block_id] for block_id in held.elements()], True)

    def _free(self, blocks: list[Any], repeated: bool) -> None:
        if repeated:
            blocks, again = _split(blocks)
            if again:
                self._free(again, True)
        # Right before: given back twice it is another's, and what raises before this is not lost.
        self._freed.update([block.block_id for block in blocks])
        self._num_held -= len(blocks)
        self._pool.free_blocks(blocks)

    def _touch_one_group(self, blocks: Sequence[Any]) -> None:
        self._pool.touch((blocks,))

    def uncache(self, blocks: Iterable[Any]) -> None:
        """Take blocks out of the prefix cache that do not hold what their keys say."""
        for block in blocks:
            self._pool._maybe_evict_cached_block(block)

    def tell_evicted(self, note: Callable[[Any], None]) -> None:
        """Nothing to tell: vLLM's own pool evicts a block when it hands it out."""

    def lookup(self) -> Callable[[Hashable], Any]:
        """What finds the GPU block of a key, or None; until the next reset of the prefix cache."""
        cached = self._pool.cached_block_hash_to_block
        found: Callable[[Hashable], Any] | None = getattr(cached, "get_one_block", None)
        if found is not None:
            return found

        def first(key: Hashable) -> Any:
            blocks = cached.get(key)
            return next(iter(blocks.values())) if blocks else None

        return first

    def content(self) -> object:
        """What has all keys of the prefix cache: a reset of it puts another in its place."""
        found: object = self._pool.cached_block_hash_to_block
        return found

    def lacks(self, keys: Iterable[Hashable]) -> bool:
        """Whether none of these keys is in the prefix cache; false where that is not known."""
        cached = self._pool.cached_block_hash_to_block
        by_key = getattr(cached, "_cache", cached)
        return isinstance(by_key, dict) and by_key.keys().isdisjoint(keys)

    def hand_out_first(self, blocks: Sequence[Any]) -> None:
        """Hand these out before all others that nobody uses, in this order.

        Up to 0.22 vLLM's queue has nothing that puts blocks to its front.

        Args:
            blocks: that nobody uses, each once; `in_order` must be true.
        """
        queue, taken = self._pool.free_block_queue, list[Any]()
        try:
            for block in blocks:
                queue.remove(block)
                taken.append(block)
        finally:  # whatever raises, no block is lost
            self._prepend(queue, taken)

    @staticmethod
    def _prepend(queue: Any, blocks: list[Any]) -> None:
        if hasattr(queue, "prepend_n"):
            queue.prepend_n(blocks)
            return
        before = queue.fake_free_list_head
        first = before.next_free_block
        for block in blocks:
            before.next_free_block, block.prev_free_block = block, before
            before = block
        before.next_free_block, first.prev_free_block = first, before
        queue.num_free_blocks += len(blocks)

    def free_after(self, block: Any, count: int) -> list[Any]:
        """So many blocks that nobody uses, or all that are left, in the order of being handed out.

        Args:
            block: one that nobody uses, behind which they are; None: from the first on.
            count: 1 or more.
        """
        queue = self._pool.free_block_queue
        if block is not None:
            block = block.next_free_block
        elif hasattr(queue, "fake_free_list_head"):
            block = queue.fake_free_list_head.next_free_block
        else:
            block = queue.free_list_head
        end = getattr(queue, "fake_free_list_tail", None)
        found: list[Any] = []
        while block is not end and block is not None:
            found.append(block)
            if len(found) == count:
                break
            block = block.next_free_block
        return found

    def _publish(
        self, keys: Sequence[Hashable], ends: Sequence[int], blocks: Sequence[Any]
    ) -> None:
        # Asked for each time: a reset puts another object in its place.
        cached = self._pool.cached_block_hash_to_block
        if not hasattr(cached, "insert"):
            for key, block in zip(keys, blocks):
                block.block_hash = key
                cached[key][block.block_id] = block
            return
        insert: Callable[[Hashable, Any], None] = cached.insert
        if not hasattr(self._pool, "_insert_block_hash"):
            for key, block in zip(keys, blocks):
                block.block_hash = key
                insert(key, block)
            return
        # For a block without any key, as fresh ones are, this is what `_insert_block_hash` does.
        for key, block, end in zip(keys, blocks, ends):
            block.set_block_hash(key, end)
            insert(key, block)


def key_maker() -> Callable[[Any, int], Hashable]:
    """A block's key in the pool, of its hash and its KV cache group."""
    from vllm.v1.core import kv_cache_utils

    made: Callable[[Any, int], Hashable] | None = getattr(
        kv_cache_utils, "make_block_hash_with_group_id", None
    )
    if made is None:
        made = kv_cache_utils.BlockHashWithGroupId
    return made


def keys_maker(key: Callable[[Any, int], Any]) -> Callable[[Iterable[Any]], Iterator[Hashable]]:
    """What makes the keys of many blocks of the first KV cache group, each when it is asked for.

    From 0.10.2 on a key is its hash and the bytes of its group, in this order: then no function
    is called for each.

    Args:
        key: what makes one, as `key_maker` says.
    """
    end, some = key(b"", 0), b"a hash"
    if isinstance(end, bytes) and key(some, 0) == some + end:
        return lambda hashes: map(add, hashes, repeat(end))
    return lambda hashes: map(key, hashes, repeat(0))


def _split(blocks: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Each block once, and what is left of them, both in order."""
    seen: set[int] = set()
    once: list[Any] = []
    again: list[Any] = []
    for block in blocks:
        (again if block.block_id in seen else once).append(block)
        seen.add(block.block_id)
    return once, again
