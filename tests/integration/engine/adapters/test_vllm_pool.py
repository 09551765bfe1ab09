"""Blocks entering vLLM's prefix cache, over the generations of its pool."""

from __future__ import annotations

import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvoffload_patch.integration.engine.adapters import vllm_pool
from kvoffload_patch.integration.engine.adapters.vllm_pool import (
    NoBlocks,
    PoolAdapter,
    key_maker,
    keys_maker,
)


class Block:
    """A KV cache block, which takes a hash once."""

    def __init__(self, block_id: int) -> None:
        self.block_id, self._hash = block_id, None

    @property
    def block_hash(self) -> Any:
        """As vLLM's."""
        return self._hash

    @block_hash.setter
    def block_hash(self, key: Any) -> None:
        assert self._hash is None
        self._hash = key

    def set_block_hash(self, key: Any, num_tokens: int | None = None) -> None:
        """As vLLM's from 0.24 on."""
        self.block_hash, self.num_tokens = key, num_tokens


class HashMap:
    """The map of 0.11 to 0.23."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, int]] = []

    def insert(self, key: Any, block: Block) -> None:
        """As vLLM's."""
        self.entries.append((key, block.block_id))

    def get_one_block(self, key: Any) -> int | None:
        """As vLLM's, but for what stands for a block."""
        return dict(self.entries).get(key)


class Pool:
    """What all generations have."""

    def __init__(self) -> None:
        self.touched: list[Any] = []
        self.freed: list[Any] = []

    def touch(self, blocks: list) -> None:
        """As vLLM's from 0.14 on: a flat sequence."""
        self.touched += blocks

    def free_blocks(self, ordered_blocks: Any) -> None:
        """As vLLM's."""
        self.freed += ordered_blocks


class PoolOfDicts(Pool):
    """0.9.1 to 0.10.2: a dict of dicts, and `touch` by group."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """As vLLM's reset: another object."""
        self.cached_block_hash_to_block: Any = defaultdict(dict)

    def touch(self, blocks: tuple[list, ...]) -> None:
        """By group."""
        for of_group in blocks:
            self.touched += of_group

    def cached(self) -> list[tuple[Any, int]]:
        """What is in the prefix cache."""
        found = self.cached_block_hash_to_block.items()
        return [(key, block_id) for key, blocks in found for block_id in blocks]


class PoolOfMap(PoolOfDicts):
    """0.11 to 0.13: a map."""

    def reset(self) -> None:
        """Another object."""
        self.cached_block_hash_to_block = HashMap()

    def cached(self) -> list[tuple[Any, int]]:
        """What is in the prefix cache."""
        return self.cached_block_hash_to_block.entries


class PoolOfMethod(PoolOfMap):
    """From 0.24 on: a method, and blocks are told the length of their prefix; `touch` is flat."""

    touch = Pool.touch

    def _insert_block_hash(self, key: Any, block: Block, num_tokens: int) -> None:
        """Where it is, `set_block_hash` is."""


HIT = (["key"], [48])  # a key, and tokens of the prefix that ends with its block
POOLS = [PoolOfDicts, PoolOfMap, PoolOfMethod]


@pytest.mark.parametrize("kind", POOLS)
def test_a_published_block_is_cached_under_its_key(kind: type[Any]) -> None:
    pool = kind()
    block = Block(7)
    adapter = PoolAdapter(pool)
    adapter.publish(*HIT, [block])
    assert block.block_hash == "key"
    assert pool.cached() == [("key", 7)]


@pytest.mark.parametrize("kind", POOLS)
def test_after_a_reset_it_is_the_new_cache_that_is_written_to(kind: type[Any]) -> None:
    pool = kind()
    adapter = PoolAdapter(pool)
    pool.reset()
    adapter.publish(*HIT, [Block(7)])
    assert pool.cached() == [("key", 7)]


@pytest.mark.parametrize("kind", POOLS)
def test_a_lookup_finds_what_the_gpu_has_under_a_key(kind: type[Any]) -> None:
    pool = kind()
    adapter = PoolAdapter(pool)
    adapter.publish(*HIT, [Block(7)])
    find = adapter.lookup()
    assert getattr(find("key"), "block_id", find("key")) == 7 and find("other") is None


def test_what_is_not_in_the_cache_is_said_of_many_keys_at_once() -> None:
    pool = PoolOfDicts()
    adapter = PoolAdapter(pool)
    adapter.publish(*HIT, [Block(7)])
    assert adapter.lacks(["other", "another"]) and not adapter.lacks(["other", "key"])
    pool.reset()
    assert adapter.lacks(["key"])
    mapped = PoolOfMap()
    assert not PoolAdapter(mapped).lacks(["key"]), "nothing is known of what is in there"
    mapped.cached_block_hash_to_block._cache = {"key": Block(7)}
    assert PoolAdapter(mapped).lacks(["other"]) and not PoolAdapter(mapped).lacks(["key"])


def test_the_newest_is_told_the_length_of_the_prefix() -> None:
    block = Block(7)
    PoolAdapter(PoolOfMethod()).publish(*HIT, [block])
    assert block.num_tokens == 48


@pytest.mark.parametrize("kind", POOLS)
def test_blocks_are_held_and_freed_in_the_order_given(kind: type[Any]) -> None:
    pool, blocks = kind(), [Block(1), Block(2)]
    adapter = PoolAdapter(pool)
    adapter.hold(blocks)
    adapter.free(reversed(blocks))
    assert pool.touched == blocks
    assert pool.freed == blocks[::-1]


class CountingPool(PoolOfMethod):
    """0.10 to 0.23: counts all references of a call down, then queues what has none left."""

    def __init__(self, references: dict[int, int]) -> None:
        super().__init__()
        self.references = references

    def free_blocks(self, ordered_blocks: Any) -> None:
        """As vLLM's."""
        blocks = list(ordered_blocks)
        for block in blocks:
            self.references[block.block_id] -= 1
        self.freed += [b.block_id for b in blocks if not self.references[b.block_id]]


@pytest.mark.parametrize(
    ("given", "references", "freed"),
    [
        ([3, 1, 2], {1: 1, 2: 1, 3: 1}, [3, 1, 2]),
        ([3, 1, 3, 2], {1: 1, 2: 1, 3: 2}, [3, 1, 2]),
        ([3, 1, 3, 2, 3, 1], {1: 2, 2: 1, 3: 3}, [3, 1, 2]),
        ([3, 1, 3, 2], {1: 1, 2: 1, 3: 3}, [1, 2]),  # another holds it as well
    ],
)
def test_a_block_that_is_freed_twice_is_queued_once(
    given: list[int], references: dict[int, int], freed: list[int]
) -> None:
    pool = CountingPool(references)
    blocks = {block_id: Block(block_id) for block_id in references}
    PoolAdapter(pool).free(blocks[block_id] for block_id in given)
    assert pool.freed == freed


def fake_hashes(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Stand in for vLLM's module of hashes."""
    for name in ("vllm", "vllm.v1", "vllm.v1.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    utils = SimpleNamespace(**functions)
    monkeypatch.setattr(sys.modules["vllm.v1.core"], "kv_cache_utils", utils, raising=False)
    monkeypatch.setitem(sys.modules, "vllm.v1.core.kv_cache_utils", utils)


def test_a_key_is_made_by_vllm_where_it_has_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hashes(
        monkeypatch,
        make_block_hash_with_group_id=lambda block_hash, group: (group, block_hash),
        BlockHashWithGroupId=bytes,  # a type, which must not be called
    )
    assert key_maker()("hash", 1) == (1, "hash")


def test_up_to_0_10_1_a_key_is_a_named_tuple(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hashes(monkeypatch, BlockHashWithGroupId=lambda block_hash, group: (block_hash, group))
    assert key_maker()("hash", 1) == ("hash", 1)


def test_keys_of_many_blocks_are_those_made_one_by_one() -> None:
    def behind(block_hash: bytes, group: int) -> bytes:
        return block_hash + group.to_bytes(4, "big")

    def before(block_hash: bytes, group: int) -> bytes:
        return group.to_bytes(4, "big") + block_hash

    for key in (behind, before, lambda block_hash, group: (block_hash, group)):
        hashes = [b"one", b"two"]
        assert list(keys_maker(key)(hashes)) == [key(block_hash, 0) for block_hash in hashes]


class CountedPool(PoolOfMethod):
    """With so many blocks that nobody uses."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.blocks = [Block(i) for i in range(free)]

    def get_num_free_blocks(self) -> int:
        """As vLLM's."""
        return len(self.blocks)

    def get_new_blocks(self, count: int) -> list[Block]:
        """As vLLM's, which raises ValueError if there are fewer."""
        return self.blocks[:count]


def test_blocks_that_are_not_there_are_no_fault() -> None:
    adapter = PoolAdapter(CountedPool(3))
    assert len(adapter.take(3)) == 3
    with pytest.raises(NoBlocks, match="expected 4 free GPU blocks, found 3"):
        adapter.take(4)


def test_a_common_prefix_is_taken_back_for_as_long_as_anything_is_held() -> None:
    """What all running requests begin with, vLLM tells by references."""

    def told() -> list[int]:
        step = SimpleNamespace(num_common_prefix_blocks=[20, 0])
        adapter.disclaim(step)
        return step.num_common_prefix_blocks

    pool = CountedPool(5)
    adapter = PoolAdapter(pool)
    assert told() == [20, 0]
    taken = adapter.take(2)
    assert told() == [0, 0]
    adapter.hold(pool.blocks[2:4])
    adapter.free(taken)
    assert told() == [0, 0]
    adapter.free([pool.blocks[2]])
    assert told() == [0, 0]
    adapter.free([pool.blocks[3]])
    assert told() == [20, 0]
    adapter.take(1)
    adapter.free_all()
    assert told() == [20, 0]
    since_0_32 = SimpleNamespace(num_common_prefix_blocks=[])
    adapter.take(1)
    adapter.disclaim(since_0_32)
    assert since_0_32.num_common_prefix_blocks == []


def test_what_was_not_given_back_before_an_interrupt_is_so_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would be nobody's, and vLLM would never reset its prefix cache again."""
    pool: Any = Pool()
    pool.blocks = blocks = [Block(n) for n in range(3)]
    adapter = PoolAdapter(pool)
    adapter.hold([*blocks, blocks[0]])

    def interrupted(_: Any) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(vllm_pool, "_split", interrupted)
    with pytest.raises(KeyboardInterrupt):
        adapter.free([*blocks, blocks[0]])
    adapter.free(blocks[1:2])
    adapter.free_all()
    assert sorted(block.block_id for block in pool.freed) == [0, 0, 1, 2]
    adapter.free_all()
    assert len(pool.freed) == 4
