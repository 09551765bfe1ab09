"""vLLM's own prefix lookup over the GPU's blocks and the tier's."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from kvoffload_patch.integration.engine.lookup_cache import Known
from kvoffload_patch.integration.engine.lookup_replay import Lookup, answer_of
from kvoffload_patch.integration.engine.vllm_scheduler import SchedulerView


class CpuHit:
    """Stands for a block that only the CPU tier has, in the result of a lookup."""

    __slots__ = ("block_hash",)

    block_id = -1
    is_null = False
    ref_cnt = 0

    def __init__(self, key: Hashable) -> None:
        self.block_hash = key


@dataclass
class Found:
    """What a request could hit.

    Attributes:
        tokens: length of the prefix found.
        gpu_tokens: length of what is found before the first block that the GPU lacks.
        gpu_blocks: vLLM's blocks of the prefix, those that loads under way fill included.
        cpu_hits: keys of the blocks to load, in prefix order.
        cpu_ends: for each of them, the tokens of the prefix that ends with it.
        missing: keys that were looked for and found nowhere.
        not_on_gpu: for these and for where it was cut short, what the pool was asked for.
        arriving: tickets of the loads under way that fill some of `gpu_blocks`.
        cut_short: whether the tier has more of it than there was room for.
        lookup: vLLM's lookup; None if it did without.
    """

    tokens: int = 0
    gpu_tokens: int = 0
    gpu_blocks: list[Any] = field(default_factory=list)
    cpu_hits: list[Hashable] = field(default_factory=list)
    cpu_ends: list[int] = field(default_factory=list)
    missing: list[Hashable] = field(default_factory=list)
    not_on_gpu: list[tuple[Hashable, list[int]]] = field(default_factory=list)
    arriving: set[int] = field(default_factory=set)
    cut_short: bool = False
    lookup: Lookup | None = None


def known_of(request: Any, found: Found) -> Known:
    """What need not be looked up again."""
    settled = not (found.cpu_hits or found.arriving or found.cut_short)
    return Known(
        num_tokens=request.num_tokens,
        hit_tokens=found.tokens,
        gpu_blocks=tuple(found.gpu_blocks),
        missing=tuple(found.missing),
        cpu_hits=len(found.cpu_hits),
        arriving=bool(found.arriving),
        settled=settled,
        answer=answer_of(found.lookup, found.not_on_gpu, {}) if settled else None,
    )


class StandInPool:
    """A block pool for lookups: what the real one has, then loads under way, then the tier.

    Everything but `get_cached_block` is the real pool's.

    Args:
        view: the scheduler.
        in_cpu: whether a key can be loaded from the tier.
        arriving: GPU block that a load under way fills, by key.
        ticket_of: ticket of that load, by key.
    """

    def __init__(
        self,
        view: SchedulerView,
        in_cpu: Callable[[Hashable], str | None],
        arriving: dict[Hashable, Any],
        ticket_of: dict[Hashable, int],
    ) -> None:
        self._view = view
        self._real = view.pool
        self._in_cpu = in_cpu
        self._arriving = arriving
        self._ticket_of = ticket_of
        self._key = view.key
        self._found = Found()
        self._cpu_hits_left = 0
        self._on_gpu = view.pool.get_cached_block

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def look_up(self, request: Any, max_cpu_hits: int) -> Found:
        """Find the longest prefix of a request, loading ``max_cpu_hits`` blocks at most."""
        found = self._found = Found()
        self._cpu_hits_left = max_cpu_hits
        self._on_gpu = self._real.get_cached_block
        groups, tokens, found.lookup = self._view.longest_hit(request, self)
        found.tokens = found.gpu_tokens = tokens
        for blocks, block_size in zip(groups, self._view.block_sizes):
            if self._cpu_hits_left == max_cpu_hits:
                found.gpu_blocks += [block for block in blocks if not block.is_null]
                continue
            hits = [index for index, block in enumerate(blocks) if block.block_id < 0]
            found.cpu_hits += [blocks[index].block_hash for index in hits]
            found.cpu_ends += [(index + 1) * block_size for index in hits]
            if hits:
                found.gpu_tokens = min(found.gpu_tokens, hits[0] * block_size)
            found.gpu_blocks += [b for b in blocks if b.block_id >= 0 and not b.is_null]
        if len(groups) > 1 and found.cpu_hits:
            in_order = sorted(zip(found.cpu_hits, found.cpu_ends), key=lambda hit: hit[1])
            found.cpu_hits, found.cpu_ends = map(list, zip(*in_order))
        return found

    def get_cached_block(
        self, block_hash: Hashable, kv_cache_group_ids: list[int]
    ) -> list[Any] | None:
        """As vLLM's: one block for each group, or None if any group lacks it."""
        # Most blocks are on the GPU, or nowhere: a lookup has hundreds, in the way of the step.
        blocks: list[Any] | None = self._on_gpu(block_hash, kv_cache_group_ids)
        if blocks:
            return blocks
        if len(kv_cache_group_ids) == 1:
            key = self._key(block_hash, kv_cache_group_ids[0])
            # As `_beyond_gpu` would say: a long hit has hundreds.
            if self._cpu_hits_left > 0 and key not in self._arriving and self._in_cpu(key):
                self._cpu_hits_left -= 1
                return [CpuHit(key)]
            block = self._beyond_gpu(block_hash, kv_cache_group_ids[0])
            return None if block is None else [block]
        blocks = []
        for group_id in kv_cache_group_ids:
            cached = self._on_gpu(block_hash, [group_id])
            block = cached[0] if cached else self._beyond_gpu(block_hash, group_id)
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def _beyond_gpu(self, block_hash: Hashable, group_id: int) -> Any:
        key = self._key(block_hash, group_id)
        if key in self._arriving:
            self._found.arriving.add(self._ticket_of[key])
            return self._arriving[key]
        if not self._in_cpu(key):
            self._found.missing.append(key)
            self._found.not_on_gpu.append((block_hash, [group_id]))
            return None
        if self._cpu_hits_left <= 0:
            self._found.cut_short = True
            self._found.not_on_gpu.append((block_hash, [group_id]))
            return None
        self._cpu_hits_left -= 1
        return CpuHit(key)
