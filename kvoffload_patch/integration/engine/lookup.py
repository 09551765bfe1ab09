"""vLLM's own prefix lookup over the GPU's blocks and the tier's: its result and its cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from kvoffload_patch.integration.engine.free_front import FreeFront
from kvoffload_patch.integration.engine.vllm_scheduler import SchedulerView
from kvoffload_patch.tier.manager import OffloadManager


class TierHit:
    """Stands for a block that only the tier has, in the place of vLLM's block.

    Attributes:
        block_hash: its key.
        place: where the tier has it, as `OffloadManager.lookup` says.
        end: tokens of the prefix that ends with it, once the lookup is over.
    """

    __slots__ = ("block_hash", "end", "place")

    block_id = -1
    is_null = False
    ref_cnt = 0

    def __init__(self, key: Hashable, place: str) -> None:
        self.block_hash = key
        self.place = place
        self.end: int


class LookupResult:
    """What a request could hit.

    Attributes:
        num_tokens: the request's length at the lookup.
        tokens: length of the prefix found.
        gpu_tokens: length of what is found before the first block that the GPU lacks.
        gpu_blocks: vLLM's blocks of the prefix, those that loads under way fill included.
        tier_hits: blocks to load, in prefix order.
        missing: keys that were looked for and found nowhere; any could make a longer hit possible.
        arriving: tickets of the loads under way that fill some of `gpu_blocks`.
        cut_short: whether the tier has more of it than there was room for.
        deferred: whether the request did not fit when it was looked up.
    """

    __slots__ = (
        "arriving", "cut_short", "deferred", "gpu_blocks", "gpu_tokens", "missing", "num_tokens",
        "tier_hits", "tokens",
    )  # fmt: skip

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.tokens = self.gpu_tokens = 0
        self.gpu_blocks: list[Any] = []
        self.tier_hits: list[TierHit] = []
        self.missing: list[Hashable] = []
        self.arriving: set[int] = set()
        self.cut_short = self.deferred = False

    @property
    def settled(self) -> bool:
        """Whether the request fitted, and all that it hits is on the GPU.

        Otherwise it is looked up again once it fits: the tier may have evicted what is to be
        loaded.
        """
        return not (self.deferred or self.tier_hits or self.arriving or self.cut_short)

    def loaded(self, blocks: Sequence[Any]) -> LookupResult:
        """What the request hits once these GPU blocks hold its `tier_hits`; none may arrive yet."""
        result = LookupResult(self.num_tokens)
        result.tokens = result.gpu_tokens = self.tokens
        result.gpu_blocks = [*self.gpu_blocks, *blocks]
        result.missing = self.missing
        return result


class StandInPool:
    """A block pool for lookups: what the real one has, then loads under way, then the tier.

    Everything but `get_cached_block` is the real pool's.

    Args:
        view: the scheduler.
        place_of: where the tier has a key that can be loaded; None if it has not.
        arriving: GPU block that a load under way fills, by key.
        ticket_of: ticket of that load, by key.
    """

    def __init__(
        self,
        view: SchedulerView,
        place_of: Callable[[Hashable], str | None],
        arriving: dict[Hashable, Any],
        ticket_of: dict[Hashable, int],
    ) -> None:
        self._view = view
        self._real = view.pool
        self._place_of = place_of
        self._arriving = arriving
        self._ticket_of = ticket_of
        self._key = view.key
        self._result = LookupResult(0)
        self._hits_left = 0
        self._on_gpu = view.gpu_lookup()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def look_up(self, request: Any, max_tier_hits: int) -> LookupResult:
        """Find the longest prefix of a request, with ``max_tier_hits`` blocks to load at most."""
        result = self._result = LookupResult(int(request.num_tokens))
        self._hits_left = max_tier_hits
        self._on_gpu = self._view.gpu_lookup()
        groups, tokens = self._view.longest_hit(request, self)
        result.tokens = result.gpu_tokens = tokens
        for blocks, block_size in zip(groups, self._view.block_sizes):
            if self._hits_left == max_tier_hits:
                result.gpu_blocks += [block for block in blocks if not block.is_null]
            else:
                _sort_out(blocks, block_size, result)
        if len(groups) > 1:
            result.tier_hits.sort(key=lambda hit: hit.end)
        return result

    def get_cached_block(
        self, block_hash: Hashable, kv_cache_group_ids: list[int]
    ) -> list[Any] | None:
        """As vLLM's: one block for each group, or None if any group lacks it."""
        # In the way of the step, hundreds of times in a lookup: what is usual is written out here.
        blocks = []
        for group_id in kv_cache_group_ids:
            key = self._key(block_hash, group_id)
            block = self._on_gpu(key)
            if block is None:
                place = None if key in self._arriving else self._place_of(key)
                if place is None or self._hits_left <= 0:
                    block = self._otherwise(key, place)
                    if block is None:
                        return None
                else:
                    self._hits_left -= 1
                    block = TierHit(key, place)
            blocks.append(block)
        return blocks

    def _otherwise(self, key: Hashable, place: str | None) -> Any:
        """The block that a load under way fills; None if there is none, or no room for a load."""
        if key in self._arriving:
            self._result.arriving.add(self._ticket_of[key])
            return self._arriving[key]
        if place is None:
            self._result.missing.append(key)
        else:
            self._result.cut_short = True
        return None


def _sort_out(blocks: Sequence[Any], block_size: int, result: LookupResult) -> None:
    """Blocks of one group, in prefix order: which are vLLM's, and which the tier's."""
    end = 0
    for block in blocks:
        end += block_size
        if block.block_id < 0:
            block.end = end
            result.tier_hits.append(block)
            result.gpu_tokens = min(result.gpu_tokens, end - block_size)
        elif not block.is_null:
            result.gpu_blocks.append(block)


class LookupCache:
    """Lookups by request, dropped when a block they rest on is reused or a key they lack stored.

    Most requests that are looked up are admitted in the same step. So a lookup costs O(1) until
    `end_step`, and O(1) for each of its blocks and keys then, if its request still waits.
    """

    def __init__(self) -> None:
        self._results: dict[str, LookupResult] = {}
        self._by_block: dict[int, set[str]] = {}
        self._by_key: dict[Hashable, set[str]] = {}
        self._new: dict[str, LookupResult] = {}  # of this step, not in the indexes yet
        self._reused: set[int] = set()  # GPU blocks handed out since the first of them

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._new or request_id in self._results

    def __len__(self) -> int:
        return len(self._results) + len(self._new)

    def get(self, request_id: str, num_tokens: int) -> LookupResult | None:
        """What a request of this length was found to hit, if it still holds."""
        result = self._new.get(request_id) or self._results.get(request_id)
        return result if result is not None and result.num_tokens == num_tokens else None

    def put(self, request_id: str, result: LookupResult) -> None:
        """Remember a lookup of this step, in place of an older one."""
        self.forget(request_id)
        self._new[request_id] = result

    def end_step(self) -> None:
        """What is left of this step's lookups is kept, unless a block was handed out meanwhile."""
        if not (self._new or self._reused):
            return
        for request_id, result in self._new.items():
            if self._reused and any(b.block_id in self._reused for b in result.gpu_blocks):
                continue
            self._results[request_id] = result
            for block in result.gpu_blocks:
                self._by_block.setdefault(block.block_id, set()).add(request_id)
            for key in result.missing:
                self._by_key.setdefault(key, set()).add(request_id)
        self._new.clear()
        self._reused.clear()

    def forget(self, request_id: str) -> None:
        """The request no longer waits, or must be looked up again."""
        self._new.pop(request_id, None)
        result = self._results.pop(request_id, None)
        if result is None:
            return
        for block in result.gpu_blocks:
            _discard(self._by_block, block.block_id, request_id)
        for key in result.missing:
            _discard(self._by_key, key, request_id)

    def blocks_reused(self, gpu_block_ids: Iterable[int]) -> None:
        """These GPU blocks were handed out: what they held is gone."""
        if self._new:
            self._reused.update(gpu_block_ids)
        if self._by_block:
            for gpu_block_id in gpu_block_ids:
                for request_id in tuple(self._by_block.get(gpu_block_id, ())):
                    self.forget(request_id)

    def keys_stored(self, keys: Iterable[Hashable]) -> None:
        """These keys can now be loaded from the tier; to be called between steps."""
        if self._by_key:
            for key in keys:
                for request_id in tuple(self._by_key.get(key, ())):
                    self.forget(request_id)

    def clear(self) -> None:
        """Forget everything."""
        for index in (self._results, self._by_block, self._by_key, self._new):
            index.clear()
        self._reused.clear()


def _discard(index: dict, item: Hashable, request_id: str) -> None:  # type: ignore[type-arg]
    waiting = index.get(item)
    if waiting is not None:
        waiting.discard(request_id)
        if not waiting:
            del index[item]


class Recency:
    """Keeps what requests hit on the GPU recent in the tier, and stores what it has lost since.

    One step later: admitting a request makes a step slow on the host as it is. What a request has
    used and stored is told to the tier once more when it has ended, all of it together.

    Args:
        view: the scheduler.
        manager: of the tier.
        front: of the free blocks, among which what is hit may have been; None: nobody asks.

    Attributes:
        used: GPU blocks, and the key of each, of prefixes that were noted.
    """

    def __init__(
        self, view: SchedulerView, manager: OffloadManager, front: FreeFront | None
    ) -> None:
        self._view = view
        self._manager = manager
        self._front = front
        self.used: list[tuple[list[int], list[Hashable]]] = []
        self._keys: dict[str, list[Hashable]] = {}  # of each request that has not ended

    def note(self, request_id: str, found: LookupResult) -> None:
        """A request hits this; loads under way may fill some of the GPU blocks."""
        blocks = found.gpu_blocks
        keys = [block.block_hash for block in blocks]
        if not all(keys):  # loads under way fill some
            blocks = [block for block, key in zip(blocks, keys) if key is not None]
        if blocks:
            ids = [block.block_id for block in blocks]
            self.used.append((ids, [key for key in keys if key is not None]))
        self._keys[request_id] = keys + [hit.block_hash for hit in found.tier_hits]

    def computes(self, request_id: str, keys: Iterable[Hashable]) -> None:
        """A request computes the blocks of these keys, behind all that were noted for it."""
        self._keys.setdefault(request_id, []).extend(keys)

    def ended(self, request_ids: Iterable[str]) -> None:
        """These requests have ended; some may be unknown here."""
        for request_id in request_ids:
            keys = self._keys.pop(request_id, None)
            if keys:
                # Some may have been computed twice, as after a preemption.
                self._manager.request_ended(list(dict.fromkeys(keys)))

    def refresh(self) -> None:
        """Make recent what was noted since the last call."""
        for gpu_block_ids, keys in self.used:
            self._manager.hit_on_gpu(gpu_block_ids, keys, self._view.still_cached)
            if self._front is not None:
                self._front.hit(gpu_block_ids)
        self.used.clear()

    def clear(self) -> None:
        """Forget what was noted."""
        self.used.clear()
        self._keys.clear()
