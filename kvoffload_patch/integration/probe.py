"""vLLM's own prefix lookup over the GPU's blocks and the tier's."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from kvoffload_patch.integration.adapters import SchedulerView


class CpuHit:
    """Stands for a block that only the CPU tier has, in the result of a lookup."""

    __slots__ = ("block_hash", "block_id", "is_null", "ref_cnt")

    def __init__(self, key: Hashable) -> None:
        self.block_hash = key
        self.block_id = -1
        self.is_null = False
        self.ref_cnt = 0


@dataclass
class Found:
    """What a request could hit.

    Attributes:
        tokens: length of the prefix found.
        gpu_tokens: length of what is found before the first block that the GPU lacks.
        gpu_blocks: vLLM's blocks of the prefix, those that loads under way fill included.
        cpu_hits: blocks to load, as (key, tokens of the prefix that ends with the block), in
            prefix order.
        missing: keys that were looked for and found nowhere.
        arriving: tickets of the loads under way that fill some of `gpu_blocks`.
        cut_short: whether the tier has more of it than there was room for.
    """

    tokens: int = 0
    gpu_tokens: int = 0
    gpu_blocks: list[Any] = field(default_factory=list)
    cpu_hits: list[tuple[Hashable, int]] = field(default_factory=list)
    missing: list[Hashable] = field(default_factory=list)
    arriving: set[int] = field(default_factory=set)
    cut_short: bool = False


class StandInPool:
    """A block pool for lookups: what the real one has, then loads under way, then the tier.

    Everything but `get_cached_block` is the real pool's.

    Args:
        view: the scheduler.
        in_cpu: whether a key can be loaded from the tier.
        arriving: GPU block and ticket of a load under way, by key.
    """

    def __init__(
        self,
        view: SchedulerView,
        in_cpu: Callable[[Hashable], bool],
        arriving: dict[Hashable, tuple[Any, int]],
    ) -> None:
        self._view = view
        self._real = view.pool
        self._in_cpu = in_cpu
        self._arriving = arriving
        self._found = Found()
        self._cpu_hits_left = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def look_up(self, request: Any, max_cpu_hits: int) -> Found:
        """Find the longest prefix of a request, loading ``max_cpu_hits`` blocks at most."""
        self._found = Found()
        self._cpu_hits_left = max_cpu_hits
        groups, tokens = self._view.longest_hit(request, self)
        found = self._found
        found.tokens = found.gpu_tokens = tokens
        for blocks, block_size in zip(groups, self._view.block_sizes):
            for index, block in enumerate(blocks):
                if isinstance(block, CpuHit):
                    found.cpu_hits.append((block.block_hash, (index + 1) * block_size))
                    found.gpu_tokens = min(found.gpu_tokens, index * block_size)
                elif not block.is_null:
                    found.gpu_blocks.append(block)
        found.cpu_hits.sort(key=lambda hit: hit[1])
        return found

    def get_cached_block(
        self, block_hash: Hashable, kv_cache_group_ids: list[int]
    ) -> list[Any] | None:
        """As vLLM's: one block for each group, or None if any group lacks it."""
        blocks = []
        for group_id in kv_cache_group_ids:
            cached = self._real.get_cached_block(block_hash, [group_id])
            block = cached[0] if cached else self._beyond_gpu(block_hash, group_id)
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def _beyond_gpu(self, block_hash: Hashable, group_id: int) -> Any:
        key = self._view.key(block_hash, group_id)
        arriving = self._arriving.get(key)
        if arriving is not None:
            block, ticket = arriving
            self._found.arriving.add(ticket)
            return block
        if not self._in_cpu(key):
            self._found.missing.append(key)
            return None
        if self._cpu_hits_left <= 0:
            self._found.cut_short = True
            return None
        self._cpu_hits_left -= 1
        return CpuHit(key)
