"""Stands in for kvcached's compiled part: pages by number, and who is told of their memory.

Read in kvcached 0.1.6 (csrc/page_allocator.cpp): a page is mapped when it is taken and unmapped
when it is given back, but for a few that are kept; a limit takes free pages away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any


class Memory:
    """The GPU's memory.

    Attributes:
        pages: that all engines can have mapped together.
        refused: so many of the next maps fail, whatever was counted.
        kept: pages that are given back and stay mapped, at most.
        mapped: pages that have memory.
        on_map, on_unmap: told of a page.
        maps, unmaps: how often that was.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self, kept: int = 0) -> None:
        """Another engine starts."""
        self.pages = 1 << 30
        self.refused = 0
        self.kept = kept
        self.mapped: set[int] = set()
        self.on_map: Callable[[int], None] = lambda page: None
        self.on_unmap: Callable[[int], None] = lambda page: None
        self.maps = self.unmaps = 0

    def map(self, page: int) -> None:
        """Raises RuntimeError where the memory is another engine's."""
        if self.refused:
            self.refused -= 1
            raise RuntimeError("another engine has the memory")
        if len(self.mapped) >= self.pages:
            raise RuntimeError("out of memory")
        assert page not in self.mapped
        self.mapped.add(page)
        self.maps += 1
        self.on_map(page)

    def unmap(self, page: int) -> None:
        self.mapped.remove(page)
        self.unmaps += 1
        self.on_unmap(page)


MEMORY = Memory()


class InternalPage:
    """A page, and which of its blocks are free."""

    def __init__(self, page_id: int, page_size: int) -> None:
        self.page_id, self.page_size = page_id, page_size
        self._free: list[int] = []
        self._count = 0

    def init(self, block_mem_size: int) -> None:
        self._free = list(
            range(*self.get_block_range(self.page_id, self.page_size, block_mem_size))
        )
        self._count = len(self._free)

    def alloc(self, num_blocks: int) -> list[int]:
        assert len(self._free) >= num_blocks
        taken, self._free = self._free[:num_blocks], self._free[num_blocks:]
        return taken

    def free_batch(self, block_ids: list[int]) -> None:
        assert not set(block_ids) & set(self._free), "a block is freed twice"
        self._free += block_ids

    def empty(self) -> bool:
        return len(self._free) == self._count

    def full(self) -> bool:
        return not self._free

    def num_free_blocks(self) -> int:
        return len(self._free)

    @staticmethod
    def get_block_range(page_id: int, page_size: int, block_mem_size: int) -> tuple[int, int]:
        first = -(-page_id * page_size // block_mem_size)
        return first, (page_id + 1) * page_size // block_mem_size

    @staticmethod
    def get_num_blocks(page_size: int, block_mem_size: int) -> int:
        return page_size // block_mem_size


class PageAllocator:
    """Pages of one pool."""

    def __init__(self, num_layers: int, mem_size: int, page_size: int, *_: Any, **__: Any) -> None:
        self._page_size = page_size
        self._total = mem_size // page_size
        self._free, self._reserved = deque(range(self._total)), deque[int]()
        self._reclaimed: deque[int] = deque()
        self._last = self._total

    def alloc_page(self) -> InternalPage:
        if self._reserved:
            return InternalPage(self._reserved.popleft(), self._page_size)
        if not self._free:
            raise RuntimeError("No free pages left")
        MEMORY.map(self._free[0])
        return InternalPage(self._free.popleft(), self._page_size)

    def free_pages(self, pages: list[int]) -> None:
        for page in pages:
            if len(self._reserved) < MEMORY.kept:
                self._reserved.append(page)
            else:
                MEMORY.unmap(page)
                self._free.append(page)

    def resize(self, new_mem_size: int) -> bool:
        pages = new_mem_size // self._page_size
        if pages < self.get_num_inuse_pages():
            return False
        while self._total < pages:
            page = self._reclaimed.popleft() if self._reclaimed else self._last
            self._last += page == self._last
            self._free.append(page)
            self._total += 1
        if self._total - pages > len(self._free):
            self.trim()
        while self._total > pages:
            self._reclaimed.append(self._free.pop())
            self._total -= 1
        return True

    def trim(self) -> None:
        while self._reserved:
            MEMORY.unmap(self._reserved[0])
            self._free.append(self._reserved.popleft())

    def get_num_free_pages(self) -> int:
        return len(self._free) + len(self._reserved)

    def get_num_inuse_pages(self) -> int:
        return self._total - self.get_num_free_pages()

    def get_num_total_pages(self) -> int:
        return self._total

    def get_num_reserved_pages(self) -> int:
        return len(self._reserved)

    def get_avail_physical_pages(self) -> int:
        return MEMORY.pages - len(MEMORY.mapped)

    def get_resize_target(self) -> int:
        return -1

    def group_indices_by_page(self, indices: list[int], block: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for index in indices:
            found.setdefault(index * block // self._page_size, []).append(index)
        return found

    def set_use_worker_ipc(self, used: bool) -> None:
        assert not used

    def start_prealloc_thread(self) -> None:
        """Nothing is mapped in advance."""

    stop_prealloc_thread = release_shared_segment = start_prealloc_thread


def init_kvcached(*_: Any, **__: Any) -> None:
    """There is nothing to begin."""


def kv_tensors_created(*_: Any, **__: Any) -> bool:
    """The device has its blocks."""
    return True


def create_kv_tensors(*_: Any, **__: Any) -> None:
    """The device has its own."""
    raise NotImplementedError


shutdown_kvcached = init_kvcached
map_to_kv_tensors = unmap_from_kv_tensors = create_kv_tensors
