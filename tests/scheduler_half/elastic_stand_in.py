"""Stands in for kvcached's block pool, on whatever vLLM of 0.26 or later is imported.

What the tier rests on is as read in kvcached 0.1.6: blocks that nobody uses are kept up to a limit,
and freed beyond it when they are given back; a shortage frees the one that was used least recently;
a block is freed with its page if no other of it is in use, and then has no memory. `elastic.py`
plays the same on kvcached's own code.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from scheduler_half import vmm_ops
from vllm.v1.core.block_pool import BlockPool


class KVCachePoolExhausted(ValueError):
    """As kvcached's."""


class Memory:
    """As far as the tier and its tests ask for it, kvcached's `KVCacheManager`."""

    block_mem_size = 2048

    def __init__(self, blocks: int, page_blocks: int, deferred: bool) -> None:
        self.page_size = page_blocks * self.block_mem_size
        self.defer_physical_release = deferred
        self.null_block: list[int] | None = None
        self._pages: dict[int, vmm_ops.InternalPage] = {}
        self._retired: list[int] = []
        self.allocator = vmm_ops.PageAllocator(0, blocks * self.block_mem_size, self.page_size)

    def _wait_post_init(self) -> None:
        """Everything is there."""

    def available_size(self) -> int:
        allocator = self.allocator
        physical = allocator.get_avail_physical_pages() + allocator.get_num_reserved_pages()
        pages = max(0, min(allocator.get_num_free_pages(), physical))
        free = sum(page.num_free_blocks() for page in self._pages.values())
        return free + pages * self.page_size // self.block_mem_size

    def alloc(self, count: int) -> list[int] | None:
        if self.available_size() < count:
            return None
        found: list[int] = []
        while len(found) < count:
            page = next((p for p in self._pages.values() if not p.full()), None)
            if page is None:
                try:
                    page = self.allocator.alloc_page()
                except RuntimeError:
                    self.free(found)
                    return None
                page.init(self.block_mem_size)
                self._pages[page.page_id] = page
            found += page.alloc(min(page.num_free_blocks(), count - len(found)))
        return found

    def free(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            page = self._pages[block_id * self.block_mem_size // self.page_size]
            page.free_batch([block_id])
            if page.empty():
                self._retired.append(page.page_id)
        if not self.defer_physical_release:
            self.release_retired_pages_through(0)

    def capture_physical_release_marker(self) -> int:
        return 0

    def release_retired_pages_through(self, marker: int) -> None:
        retired, self._retired = set(self._retired), []
        empty = [page for page in retired if page in self._pages and self._pages[page].empty()]
        for page in empty:
            del self._pages[page]
        self.allocator.free_pages(empty)

    def resize(self, new_mem_size: int) -> bool:
        return self.allocator.resize(new_mem_size)

    def _get_num_alloced_blocks(self) -> int:
        whole = len(self._pages) * (self.page_size // self.block_mem_size)
        return whole - sum(page.num_free_blocks() for page in self._pages.values())


class ElasticBlockPool(BlockPool):
    """vLLM's pool, but for which blocks are free and what becomes of them."""

    def __init__(self, native: BlockPool, page_blocks: int, limit: int, deferred: bool) -> None:
        super().__init__(native.num_gpu_blocks, True, native.hash_block_size)
        self.max_cached_blocks = limit
        self._evictable_blocks: OrderedDict[int, Any] = OrderedDict()
        self.kv_cache_manager = Memory(native.num_gpu_blocks, page_blocks, deferred)
        self.kv_cache_manager.null_block = self.kv_cache_manager.alloc(1)
        self.null_block = self.blocks[0]
        self.null_block.is_null = True

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        short = num_blocks - self.kv_cache_manager.available_size()
        if short > 0:
            self._evict_blocks_from_pool(short)
        found = self.kv_cache_manager.alloc(num_blocks)
        if found is None:
            raise KVCachePoolExhausted(f"requested={num_blocks}")
        for block_id in found:
            self.blocks[block_id].ref_cnt = 1
        return [self.blocks[block_id] for block_id in found]

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            if not block.is_null:
                block.ref_cnt += 1
                self._evictable_blocks.pop(block.block_id, None)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        for block in ordered_blocks:
            if block.is_null:
                continue
            assert block.ref_cnt > 0
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._let_go(block)
        if self.max_cached_blocks >= 0:
            self._evict_blocks_from_pool(len(self._evictable_blocks) - self.max_cached_blocks)

    def _let_go(self, block: Any) -> None:
        if block.block_hash is not None:
            self._evictable_blocks[block.block_id] = block
        else:
            self.kv_cache_manager.free([block.block_id])

    def _evict_blocks_from_pool(self, count: int) -> None:
        for block_id in list(self._evictable_blocks)[: max(0, count)]:
            self._remove_cached_block_hashes(self._evictable_blocks.pop(block_id))
            self.kv_cache_manager.free([block_id])

    def evict_blocks(self, block_ids: set[int]) -> None:
        for block_id in block_ids:
            self._remove_cached_block_hashes(self.blocks[block_id])
            if self._evictable_blocks.pop(block_id, None) is not None:
                self.kv_cache_manager.free([block_id])

    def reset_prefix_cache(self) -> bool:
        if any(block.ref_cnt and not block.is_null for block in self.blocks):
            return False
        self._evict_blocks_from_pool(len(self._evictable_blocks))
        return True

    def get_num_free_blocks(self) -> int:
        return self.kv_cache_manager.available_size() + len(self._evictable_blocks)

    def get_usage(self) -> float:
        return 1.0 - self.get_num_free_blocks() / self.num_gpu_blocks


def put_into(scheduler: Any, page_blocks: int, limit: int, deferred: bool) -> None:
    """The scheduler's pool is this one, where kvcached's patch of the coordinator puts its own."""
    manager = scheduler.kv_cache_manager
    pool = ElasticBlockPool(manager.block_pool, page_blocks, limit, deferred)
    for holder in (manager, manager.coordinator, *manager.coordinator.single_type_managers):
        holder.block_pool = pool
    for one in manager.coordinator.single_type_managers:
        one._null_block = pool.null_block
    allocate = manager.allocate_slots

    def allocate_slots(*args: Any, **kwargs: Any) -> Any:
        try:
            return allocate(*args, **kwargs)
        except KVCachePoolExhausted:
            return None  # a request waits, as for want of blocks

    manager.allocate_slots = allocate_slots
