"""What the tier does to a pool of kvcached's, on one made up for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from kvoffload_patch.integration.engine.adapters.elastic_pool import (
    ElasticPoolAdapter,
    TransferRefs,
    adapter_of,
)
from kvoffload_patch.integration.engine.adapters.vllm_pool import NoBlocks, PoolAdapter
from kvoffload_patch.links import CPU, GPU, LOAD, STORE
from kvoffload_patch.plan import Transfer


class KVCachePoolExhausted(ValueError):
    """As kvcached's."""


class ElasticBlockPool:
    """What is asked of kvcached's pool."""

    def __init__(self, null_block: list[int] | None = [0]) -> None:  # noqa: B006 - not changed
        self.blocks = [SimpleNamespace(block_id=i, ref_cnt=0) for i in range(9)]
        self.kv_cache_manager = SimpleNamespace(
            null_block=null_block, _wait_post_init=lambda: self.said.append("waited")
        )
        self.said: list[Any] = []
        self.error: Exception | None = None

    def get_num_free_blocks(self) -> int:
        return len(self.blocks)

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        if self.error is not None:
            raise self.error
        return self.blocks[:num_blocks]

    def touch(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Any) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            self.said.append(block.block_id)

    def _insert_block_hash(self, key: Any, block: Any, end: int) -> None:
        self.said.append((key, block.block_id, end))

    def _remove_cached_block_hashes(self, block: Any) -> list[str]:
        return [f"of {block.block_id}"]


def store(ticket: int, *ids: int) -> Transfer:
    """A store of these GPU blocks."""
    return Transfer(ticket, GPU, CPU, ids, tuple(range(len(ids))))


def test_it_is_chosen_by_the_name_of_the_pools_class() -> None:
    def touch(blocks: list) -> None:
        pass

    assert isinstance(adapter_of(ElasticBlockPool()), ElasticPoolAdapter)
    plain = adapter_of(SimpleNamespace(touch=touch))
    assert type(plain) is PoolAdapter and not plain.elastic


def test_it_waits_for_the_first_page_and_refuses_a_pool_without() -> None:
    pool = ElasticBlockPool()
    assert adapter_of(pool).elastic and pool.said == ["waited"]
    with pytest.raises(RuntimeError, match="kvcached's first page, found none; free memory"):
        adapter_of(ElasticBlockPool(null_block=None))


def test_blocks_that_were_counted_and_are_gone_are_no_fault() -> None:
    pool = ElasticBlockPool()
    adapter = ElasticPoolAdapter(pool)
    pool.error = KVCachePoolExhausted("requested=3")
    with pytest.raises(NoBlocks, match="requested=3"):
        adapter.take(3)
    pool.error = ValueError("another")
    with pytest.raises(ValueError, match="another"):
        adapter.take(3)


def test_keys_are_set_by_the_pool_itself() -> None:
    pool = ElasticBlockPool()
    adapter = ElasticPoolAdapter(pool)
    pool.said.clear()
    adapter.publish(["a", "b"], [16, 32], pool.blocks[1:3])
    assert pool.said == [("a", 1, 16), ("b", 2, 32)]
    assert adapter.free_after(None, 5) == []


def test_what_is_evicted_is_told_until_everything_is_given_back() -> None:
    pool, told = ElasticBlockPool(), list[Any]()
    adapter = ElasticPoolAdapter(pool)
    adapter.tell_evicted(told.append)
    assert pool._remove_cached_block_hashes(pool.blocks[3]) == ["of 3"]
    assert told == [pool.blocks[3]]
    adapter.hold(pool.blocks[4:6])
    adapter.free_all()
    assert "_remove_cached_block_hashes" not in vars(pool)
    assert not any(block.ref_cnt for block in pool.blocks)


def test_of_what_is_taken_out_of_the_prefix_cache_nobody_is_told() -> None:
    pool, told, forgotten = ElasticBlockPool(), list[Any](), list[Any]()
    adapter = ElasticPoolAdapter(pool)
    adapter.tell_evicted(told.append)
    with mock.patch.object(
        ElasticBlockPool, "_remove_cached_block_hashes", lambda self, block: forgotten.append(block)
    ):
        adapter.uncache(pool.blocks[2:4])
    assert forgotten == pool.blocks[2:4] and not told


def test_blocks_of_copies_are_referenced_until_they_are_done_and_once() -> None:
    pool = ElasticBlockPool()
    refs = TransferRefs(ElasticPoolAdapter(pool), pool.blocks)
    load = Transfer(1, CPU, GPU, (7, 8), (5, 6))
    for _ in range(2):
        refs.keep([load])
        refs.keep([store(1, 1, 2), store(2, 2, 3)])
    assert [block.ref_cnt for block in pool.blocks] == [0, 1, 2, 1, 0, 1, 1, 0, 0]
    pool.said.clear()
    refs.give_back({LOAD: 0, STORE: 1}.__getitem__)
    assert pool.said == [2, 1], "the tail of a prefix is evicted first"
    refs.give_back({LOAD: 1, STORE: 1}.__getitem__)
    assert pool.said[2:] == [6, 5]
    refs.give_back({LOAD: 1, STORE: 2}.__getitem__)
    assert not any(block.ref_cnt for block in pool.blocks)
