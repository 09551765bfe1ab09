"""kvcached's block pool, whose blocks lose their memory once nobody references them.

By feature it is the pool of vLLM 0.26 and later, whose keys are vLLM's own. What differs: a key
is to be set by `_insert_block_hash`, or a block that is given back is freed with what it holds;
blocks that nobody uses are evicted when requests give them up, and not only when they are handed
out; and there may be none although some were counted, because another engine has taken the memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from kvoffload_patch.integration.engine.adapters.vllm_pool import NoBlocks, PoolAdapter
from kvoffload_patch.integration.kvcached import is_elastic
from kvoffload_patch.links import GPU, Link
from kvoffload_patch.plan import Transfer

_EXHAUSTED = "KVCachePoolExhausted"
_FORGET = "_remove_cached_block_hashes"  # of the pool: called for each cached block that it evicts


class ElasticPoolAdapter(PoolAdapter):
    """One block pool of kvcached's.

    Args:
        pool: a `vllm.v1.core.block_pool.ElasticBlockPool`, which kvcached puts there.

    Raises:
        RuntimeError: the page of the null block has no memory; the tier is tried with that page.
    """

    elastic = True

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        memory = pool.kv_cache_manager
        memory._wait_post_init()
        if memory.null_block is None:
            raise RuntimeError(
                "expected memory for kvcached's first page, found none; free memory of the GPU"
            )

    def take(self, count: int) -> list[Any]:
        """Fresh GPU blocks, referenced.

        Raises:
            NoBlocks: the memory that was there when blocks were counted is another engine's now.
        """
        try:
            return super().take(count)
        except ValueError as error:
            if type(error).__name__ != _EXHAUSTED:
                raise
            raise NoBlocks(str(error)) from error

    def free_after(self, block: Any, count: int) -> list[Any]:
        """None: the pool has no order in which it hands blocks out."""
        return []

    def uncache(self, blocks: Iterable[Any]) -> None:
        """As for vLLM's pool; of these nobody is told, or they would be stored."""
        forget = getattr(type(self._pool), _FORGET)
        for block in blocks:
            forget(self._pool, block)

    def tell_evicted(self, note: Callable[[Any], None]) -> None:
        """Call ``note`` with each block that the pool evicts; until `free_all`."""
        forget = getattr(self._pool, _FORGET)

        def evict(block: Any) -> Any:
            note(block)
            return forget(block)

        setattr(self._pool, _FORGET, evict)

    def free_all(self) -> None:
        """Give back every reference, and tell of evicted blocks no more."""
        self._pool.__dict__.pop(_FORGET, None)
        super().free_all()

    def _publish(
        self, keys: Sequence[Hashable], ends: Sequence[int], blocks: Sequence[Any]
    ) -> None:
        for key, block, end in zip(keys, blocks, ends):
            self._pool._insert_block_hash(key, block, end)


class TransferRefs:
    """References on the GPU blocks of transfers that are not done.

    Args:
        adapter: of the pool.
        blocks: of the pool, by GPU block id.
    """

    def __init__(self, adapter: PoolAdapter, blocks: Sequence[Any]) -> None:
        self._adapter = adapter
        self._blocks = blocks
        self._kept: dict[Link, deque[tuple[int, list[Any]]]] = {}

    def keep(self, transfers: Iterable[Transfer]) -> None:
        """Reference the blocks of these, unless they are; of a link the earlier ones first."""
        for transfer in transfers:
            kept = self._kept.setdefault((transfer.source, transfer.target), deque())
            if kept and transfer.ticket <= kept[-1][0]:
                continue
            ids = transfer.source_ids if transfer.source == GPU else transfer.target_ids
            blocks = list(map(self._blocks.__getitem__, ids))
            self._adapter.hold(blocks)
            kept.append((transfer.ticket, blocks))

    def give_back(self, last_done: Callable[[Link], int]) -> None:
        """Give up the references of what is done, the tail of a prefix first."""
        for link, kept in self._kept.items():
            while kept and kept[0][0] <= last_done(link):
                self._adapter.free(reversed(kept.popleft()[1]))


def adapter_of(pool: Any) -> PoolAdapter:
    """How blocks enter and leave this pool's prefix cache."""
    return ElasticPoolAdapter(pool) if is_elastic(pool) else PoolAdapter(pool)
