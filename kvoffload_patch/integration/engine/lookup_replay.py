"""Lookups that vLLM need not repeat.

`schedule` looks up the prefix of each request that it admits, which the tier has done just before:
hundreds of blocks, in the way of the step. So what a lookup found is kept for the step, with
loaded blocks in the places of what only the tier had, and vLLM is given that when it asks.

That is right only where a lookup's result holds every block that the lookup has seen, so that
nothing else can change what vLLM would find: with one KV cache group of full attention, whose
lookup ends at the first block that is nowhere. Several groups, windows and drafting models drop
blocks that they have seen, and count them (`num_uncached_common_prefix_tokens`).
"""

from __future__ import annotations

from typing import Any

from kvoffload_patch.integration.engine.lookup import LookupResult
from kvoffload_patch.integration.engine.vllm_scheduler import SchedulerView


class LookupReplay:
    """Stands in for `find_longest_cache_hit` of a scheduler's coordinator, where that is right.

    A result is given back only if looking up again would give the same: every block is still in the
    prefix cache under its key, and the next one still is not.

    Args:
        view: the scheduler.
    """

    def __init__(self, view: SchedulerView) -> None:
        self._coordinator = view.manager.coordinator
        self._request_hashes = getattr(view.manager, "req_to_block_hashes", None)  # up to 0.10.0
        self._look_up = self._coordinator.find_longest_cache_hit
        self._block_size = view.block_sizes[0]
        self._given: dict[int, tuple[Any, LookupResult]] = {}  # by id() of the list of hashes
        self._rest: tuple[Any, ...] = ()  # what a result has besides blocks and tokens
        self._knows_rest = False
        managers = self._coordinator.single_type_managers
        full = [type(manager).__name__ for manager in managers] == ["FullAttentionManager"]
        self.possible = full and view.decode_tokens == 1
        if self.possible:
            self._coordinator.find_longest_cache_hit = self._find
            view.undo.append(self.close)

    def give(self, request: Any, result: LookupResult) -> None:
        """Within this step, give ``result`` when vLLM looks the request up; all is on the GPU."""
        if self.possible and result.tokens:
            by_request = self._request_hashes
            hashes = request.block_hashes if by_request is None else by_request[request.request_id]
            self._given[id(hashes)] = hashes, result

    def end_step(self) -> None:
        """`schedule` has returned."""
        self._given.clear()

    def close(self) -> None:
        """The coordinator looks everything up by itself again."""
        self._given.clear()
        if self.possible:
            self._coordinator.__dict__.pop("find_longest_cache_hit", None)

    def _find(self, block_hashes: Any, max_cache_hit_length: int) -> tuple[Any, ...]:
        given = self._given.get(id(block_hashes)) if self._knows_rest else None
        if given is not None and self._holds(given[1], block_hashes, max_cache_hit_length):
            return ([*given[1].prefix],), given[1].tokens, *self._rest
        found: tuple[Any, ...] = self._look_up(block_hashes, max_cache_hit_length)
        self._rest, self._knows_rest = found[2:], True
        return found

    def _holds(self, result: LookupResult, block_hashes: Any, max_length: int) -> bool:
        if max_length != result.num_tokens - 1:
            return False
        if [block.block_hash for block in result.prefix] != result.keys:
            return False
        end = len(result.prefix)
        if end >= max_length // self._block_size:
            return True
        return not self._coordinator.block_pool.get_cached_block(block_hashes[end], [0])
