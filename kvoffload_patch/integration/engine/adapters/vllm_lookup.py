"""vLLM's own prefix lookup, made over another pool, and its result given back to vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvoffload_patch.integration.engine.adapters.vllm_experts import ExpertRecords
from kvoffload_patch.patching import is_set_on


class Search(NamedTuple):
    """What `KVCacheCoordinator.find_longest_cache_hit` was asked, and what it returned.

    ``result`` is of the release's own shape: a list of blocks for each group, the tokens that are
    hit, and from 0.26 on `uncached`. ``may_grow``: more may be found by now, which others of the
    step compute.
    """

    block_hashes: Any
    max_cache_hit_length: int
    result: Any
    may_grow: bool = True

    @property
    def groups(self) -> Sequence[list[Any]]:
        """Blocks by KV cache group, the very lists that vLLM is given."""
        groups: Sequence[list[Any]] = self.result[0]
        return groups

    @property
    def uncached(self) -> int:
        """From 0.26 on: tokens behind the hit that only some groups have.

        Where blocks of windows and states are few, vLLM keeps those at the end of such a prefix.
        """
        return int(self.result[2]) if len(self.result) > 2 else 0


class OrderedPool:
    """A block pool for one lookup: the real one, but for `get_cached_block`."""

    def __init__(self, real: Any, get_cached_block: Callable[..., list[Any] | None]) -> None:
        self._real = real
        self.get_cached_block = get_cached_block

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class PrefixLookup:
    """The prefix lookup of one KV cache manager, whose coordinator's part is stood in for.

    vLLM looks up each request that it admits. Where the tier has done so within the same step, and
    holds every block that it found, vLLM is given that result in place of a second search, or where
    that finds no more: all but the search itself, statistics and events included, is still its own.

    Args:
        manager: a `vllm.v1.core.kv_cache_manager.KVCacheManager`.
        experts: records that a hit must have; None where answers do not say what they say.

    Attributes:
        given: what vLLM finds, until it is cleared.
        experts: as given.
        failed: told where something has failed, and how, while vLLM looks a request up, which then
            searches by itself.
    """

    failed: Callable[[str, Exception], object]

    def __init__(self, manager: Any, experts: ExpertRecords | None = None) -> None:
        self._manager, self.experts = manager, experts
        self._most: int | None = None  # of the request that is looked up for the tier
        self._coordinator = coordinator = manager.coordinator
        self._holders = [coordinator, *coordinator.single_type_managers]
        # From 0.26 on a lookup can tell of the blocks that it finds.
        self._reports_reuse = bool(getattr(manager, "enable_kv_cache_events", False))
        self._log_stats = manager.log_stats
        self._search = coordinator.find_longest_cache_hit
        self.given: dict[int, Search] = {}
        self._searching = False  # for the tier
        self._last: Search | None = None
        coordinator.find_longest_cache_hit = self._find

    def longest_hit(self, request: Any, pool: Any) -> tuple[Sequence[list[Any]], int]:
        """A request's longest hit over another pool: (blocks by group, tokens)."""
        manager, self._last = self._manager, None
        # Over the real pool: a block that only the tier has says nothing of what vLLM keeps.
        self._most = self.experts.most_tokens(request) if self.experts else None
        try:
            self._searching = True
            for holder in self._holders:
                holder.block_pool = pool
            manager.log_stats = False  # this is not a query that users should see
            if self._reports_reuse:
                manager.enable_kv_cache_events = False
            found = manager.get_computed_blocks(request)
        finally:
            self._search_over()
        return found[0].blocks, int(found[1])

    def _search_over(self) -> None:
        """vLLM looks up in its own pool again, and counts it."""
        manager = self._manager
        for holder in self._holders:
            holder.block_pool = manager.block_pool
        manager.log_stats = self._log_stats
        if self._reports_reuse:
            manager.enable_kv_cache_events = True
        self._searching, self._most = False, None

    def take_search(self) -> Search | None:
        """What the last lookup rests on; None if vLLM did not search, or it was taken."""
        search, self._last = self._last, None
        return search

    def give(self, search: Search) -> None:
        """vLLM finds this for the same request until `given` is cleared; it is vLLM's from now on.

        Every block must be in the prefix cache, and referenced until then.
        """
        self.given[id(search.block_hashes)] = search

    def restore(self) -> None:
        """The coordinator's search is its own again, and records are kept as before.

        A lookup for the tier may have been interrupted anywhere.
        """
        self._search_over()
        if self.experts is not None:
            self.experts.restore()
        self.given.clear()
        if is_set_on(self._coordinator, "find_longest_cache_hit"):
            del self._coordinator.find_longest_cache_hit

    def _find(self, block_hashes: Any, max_cache_hit_length: int) -> Any:
        """As `KVCacheCoordinator.find_longest_cache_hit`."""
        if self.given:
            try:
                found = self._take_given(block_hashes, max_cache_hit_length)
            except Exception as error:  # noqa: BLE001 - whatever it is, vLLM goes on
                self.given.clear()
                self.failed("find_longest_cache_hit", error)
                found = None
            if found is not None:
                return found
        if self._most is not None:
            max_cache_hit_length = min(max_cache_hit_length, self._most)
        result = self._search(block_hashes, max_cache_hit_length)
        if self._searching:
            self._last = Search(block_hashes, max_cache_hit_length, result)
        return result

    def _take_given(self, block_hashes: Any, max_cache_hit_length: int) -> Any:
        """What was given for this search, or what is longer; None if nothing was."""
        given = self.given.pop(id(block_hashes), None)
        if given is None or given.max_cache_hit_length != max_cache_hit_length:
            return None
        if not given.may_grow:
            return given.result
        now = self._search(block_hashes, max_cache_hit_length)
        longer = now[1:] > given.result[1:]
        return now if longer or _has_moved(given.groups) else given.result


def _has_moved(groups: Sequence[Sequence[Any]]) -> bool:
    """Whether a block of which a part is hit, the last one, has lost its key in this very step.

    The step makes a copy of it, which has the key now (`BlockPool.move_block_hashes`), and writes
    to it. What vLLM finds by itself names the copy, which it does not hit before it is made.
    """
    last = [hit[-1] for hit in groups if hit]
    return any(block.block_hash is None and not block.is_null for block in last)
