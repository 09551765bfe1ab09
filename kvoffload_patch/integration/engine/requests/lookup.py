"""vLLM's own prefix lookup over the GPU's blocks and the tier's: its result and its cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

from kvoffload_patch.integration.engine.adapters.vllm_groups import leaves_last_out
from kvoffload_patch.integration.engine.adapters.vllm_lookup import OrderedPool, Search
from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView
from kvoffload_patch.tier.manager import OffloadManager


class TierHit:
    """Stands for a block that only the tier has, in the place of vLLM's block."""

    __slots__ = ("block_hash",)

    block_id = -1
    is_null = False
    ref_cnt = 0

    def __init__(self, key: Hashable) -> None:
        self.block_hash = key


STAND_IN = TierHit(None)  # for any of them, where their order says which


class LookupResult:
    """What a request could hit.

    Attributes:
        num_tokens: the request's length at the lookup.
        tokens: length of the prefix found.
        gpu_tokens: length of what is found before the first block that the GPU lacks.
        gpu_blocks: vLLM's blocks of the prefix, those that loads under way fill included.
        keys: of the blocks to load, in prefix order.
        ends: tokens of the prefix that ends with each of them.
        missing: keys that were looked for and found nowhere; any could make a longer hit possible.
        arriving: tickets of the loads under way that fill some of `gpu_blocks`.
        cut_short: whether the tier has more of it than there was room for.
        deferred: whether the request did not fit when it was looked up.
        search: what vLLM's own search returned, with stand-ins for the blocks to load, which is
            given back to vLLM; None where it finds as much by itself.
        spared: tokens that the tier has behind these, and that are computed (`LoadChoice`).
        positions: of the stand-ins, where vLLM has one KV cache group and all are alike.
        only_given: whether vLLM may find less unless it is given `search`, for a step: it leaves
            out a block for a drafting model, or has more of the prefix in some groups.
    """

    __slots__ = (
        "arriving", "cut_short", "deferred", "ends", "gpu_blocks", "gpu_tokens", "keys", "missing",
        "num_tokens", "only_given", "positions", "search", "spared", "tokens",
    )  # fmt: skip

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.tokens = self.gpu_tokens = self.spared = 0
        self.gpu_blocks: list[Any] = []
        self.keys: list[Hashable] = []
        self.ends: Sequence[int] = ()
        self.missing: list[Hashable] = []
        self.arriving: set[int] = set()
        self.cut_short = self.deferred = self.only_given = False
        self.search: Search | None = None
        self.positions: Sequence[int] = []

    @property
    def settled(self) -> bool:
        """Whether the request fitted, and all that it hits is on the GPU.

        Otherwise it is looked up again once it fits: the tier may have evicted what is to be
        loaded.
        """
        return not (self.deferred or self.keys or self.arriving or self.cut_short)

    def loaded(self, blocks: Sequence[Any]) -> LookupResult:
        """What the request hits once these GPU blocks hold its `keys`; none may arrive yet."""
        result = LookupResult(self.num_tokens)
        result.tokens = result.gpu_tokens = self.tokens
        result.gpu_blocks = self.merged(self.gpu_blocks, blocks)
        result.missing, result.only_given = self.missing, self.only_given
        if self.search is not None:
            result.search = self.search
            self._fill(self.search.groups, blocks)
        return result

    def merged(self, on_gpu: Sequence[Any], loads: Sequence[Any]) -> list[Any]:
        """One for each of `gpu_blocks` and of `keys`, in prefix order if there is one group."""
        if not self.positions or isinstance(self.positions, range):
            return [*on_gpu, *loads]
        places, ours, others = {*self.positions}, iter(loads), iter(on_gpu)
        count = len(on_gpu) + len(loads)
        return [next(ours if at in places else others) for at in range(count)]

    def _fill(self, groups: Sequence[list[Any]], blocks: Sequence[Any]) -> None:
        """Put these blocks in the places of their stand-ins."""
        hit, at = groups[0], self.positions
        if isinstance(at, range):
            hit[at.start : at.stop] = blocks
        elif at:
            for position, block in zip(at, blocks):
                hit[position] = block
        else:
            loaded = dict(zip(self.keys, blocks))
            for hit in groups:
                hit[:] = [loaded[one.block_hash] if one.block_id < 0 else one for one in hit]


class StandInPool:
    """A block pool for lookups: what the real one has, then loads under way, then the tier.

    Everything but `get_cached_block` is the real pool's.

    Args:
        view: the scheduler.
        manager: of the tier.
        arriving: GPU block that a load under way fills, by key.
        ticket_of: ticket of that load, by key.
    """

    def __init__(
        self,
        view: SchedulerView,
        manager: OffloadManager,
        arriving: dict[Hashable, Any],
        ticket_of: dict[Hashable, int],
    ) -> None:
        self._view = view
        self._real = view.pool
        self._manager = manager
        self._arriving = arriving
        self._ticket_of = ticket_of
        self._key = view.key
        self._result = LookupResult(0)
        self._stand_ins, self._most = dict[Hashable, TierHit](), 0  # of one lookup
        self._on_gpu = view.gpu_lookup()
        self._hashes_blocks = view.hashes_blocks()
        self._leaves_last_out = leaves_last_out(view.manager.coordinator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def look_up(self, request: Any, max_tier_hits: int) -> LookupResult:
        """Find the longest prefix of a request, with ``max_tier_hits`` blocks to load at most."""
        result = self._result = LookupResult(int(request.num_tokens))
        if self._view.in_order:
            self._look_up_in_order(request, result, max_tier_hits)
            return result
        self._stand_ins, self._most, self._on_gpu = {}, max_tier_hits, self._view.gpu_lookup()
        groups, tokens = self._view.prefix.longest_hit(request, self)
        if 0 < tokens <= self._view.groups.replay_tokens:  # vLLM leaves it, and computes all of it
            result.arriving.clear()
            return result
        result.tokens = result.gpu_tokens = tokens
        hits: list[tuple[int, Hashable]] = []
        for blocks, block_size in zip(groups, self._view.block_sizes):
            if len(blocks) * block_size > tokens:  # up to 0.22 vLLM shortens the first group alone
                del blocks[-(-tokens // block_size) :]
            hits += _sort_out(blocks, block_size, result)
        hits.sort(key=itemgetter(0))
        result.keys, result.ends = [key for _, key in hits], [end for end, _ in hits]
        search = self._view.prefix.take_search()
        uncached = search is not None and search.uncached > 0
        result.only_given = uncached or (self._leaves_last_out and tokens > 0)
        if hits or result.only_given:
            result.search = search
        return result

    def get_cached_block(
        self, block_hash: Hashable, kv_cache_group_ids: list[int]
    ) -> list[Any] | None:
        """As vLLM's: one block for each group, or None if any group lacks it."""
        blocks = []
        for group_id in kv_cache_group_ids:
            key = self._key(block_hash, group_id)
            block = self._on_gpu(key)
            if block is None:  # vLLM may have asked for it before
                room = len(self._stand_ins) < self._most
                block = self._stand_ins.get(key) or self._otherwise(key, room)
                if block is None:
                    return None
                if block is STAND_IN:
                    block = self._stand_ins[key] = TierHit(key)
            blocks.append(block)
        return blocks

    def _look_up_in_order(self, request: Any, result: LookupResult, max_tier_hits: int) -> None:
        """The same where vLLM asks for block after block, and for none behind one it does not get.

        The result is one that vLLM can be given in place of its own.
        """
        if self._hashes_blocks and self._lack_first(request, result):
            return
        on_gpu, behind = result.gpu_blocks, list[Any]()
        hashes = request.block_hashes if self._hashes_blocks else ()  # what vLLM asks for
        find = self._in_order(result, hashes, max_tier_hits, behind)
        (blocks,), tokens = self._view.prefix.longest_hit(request, OrderedPool(self._real, find))
        result.tokens = result.gpu_tokens = tokens
        size, begin, end = self._view.block_sizes[0], len(on_gpu), len(blocks)
        if behind:  # blocks of the GPU behind some that it has lost
            result.positions = [at for at, block in enumerate(blocks) if block is STAND_IN]
            result.ends = [size * (at + 1) for at in result.positions]
            on_gpu[:] = [block for block in blocks if block is not STAND_IN]
        else:
            result.positions = range(begin, end)
            result.ends = range(size * (begin + 1), size * (end + 1), size)
        # vLLM may leave out the last ones.
        del on_gpu[end:], result.keys[len(result.positions) :]
        result.only_given = self._leaves_last_out and end > 0
        if result.keys:
            result.gpu_tokens = size * result.positions[0]
        if (result.keys or result.only_given) and (search := self._view.prefix.take_search()):
            # No other request has its end without all of it.
            result.search = search._replace(may_grow=not result.keys)

    def _lack_first(self, request: Any, result: LookupResult) -> bool:
        """Whether nobody has a request's first block, as of a prompt that is new: no search."""
        if not (hashes := request.block_hashes):
            return False
        key = self._key(hashes[0], 0)
        if self._view.gpu_lookup()(key) or key in self._arriving or self._manager.lookup(key):
            return False
        result.missing.append(key)
        return True

    def _in_order(
        self, result: LookupResult, hashes: Sequence[Hashable], most: int, behind: list[Any]
    ) -> Callable[[Hashable, list[int]], list[Any] | None]:
        """What stands for `get_cached_block`, for one lookup.

        ``result`` takes what is found on the GPU before the first block to load, and the keys of
        those to load, ``most`` at most; ``behind`` takes what is found on the GPU behind that.
        """
        on_gpu, keys = result.gpu_blocks, result.keys
        # In the way of the step, hundreds of times in a lookup.
        key_of, gpu_block, otherwise = self._key, self._view.gpu_lookup(), self._otherwise
        slot, arriving, stand_in = self._manager.reader(), self._arriving, [STAND_IN]
        run: Iterator[Any] = iter(())  # hashes and keys, of blocks to load
        known: Iterator[Any] = zip(hashes, self._view.keys_of(hashes))

        def get_cached_block(block_hash: Hashable, _: list[int]) -> list[Any] | None:
            nonlocal run, known
            for expected, key in run:
                if expected is block_hash:
                    keys.append(key)
                    return stand_in
                run = iter(())  # vLLM asks in another order: each block is looked for by itself
                break
            expected, key = next(known, (None, None))
            if expected is not block_hash:
                known, key = iter(()), key_of(block_hash, 0)
            block = gpu_block(key)
            if block is None:
                if len(keys) < most and key not in arriving and slot(key) is not None:
                    keys.append(key)
                    if len(keys) == 1:
                        run = self._run_behind(hashes, len(on_gpu), most)
                    return stand_in
                if (block := otherwise(key, False)) is None:
                    return None
            (behind if keys else on_gpu).append(block)
            return [block]

        return get_cached_block

    def _run_behind(self, hashes: Sequence[Hashable], at: int, most: int) -> Iterator[Any]:
        """Hashes and keys of the blocks to load right behind this one, looked for all at once.

        None where it is not known that all of them have to be loaded: some may be on the GPU.
        """
        rest = hashes[at + 1 : at + most]
        keys = list(self._view.keys_of(rest))
        del keys[self._manager.num_readable(keys) :]
        if not self._view.gpu_lacks(keys) or not self._arriving.keys().isdisjoint(keys):
            return iter(())
        return zip(rest, keys)

    def _otherwise(self, key: Hashable, room: bool) -> Any:
        """A block that the GPU lacks: one that a load fills, or a stand-in; None if it is missed.

        ``room``: whether one more can be loaded.
        """
        if key in self._arriving:
            self._result.arriving.add(self._ticket_of[key])
            return self._arriving[key]
        if not self._manager.lookup(key):
            self._result.missing.append(key)
            return None
        if room:
            return STAND_IN
        self._result.cut_short = True
        return None


def _sort_out(
    blocks: Sequence[Any], block_size: int, result: LookupResult
) -> Iterator[tuple[int, Hashable]]:
    """Blocks of one group, in prefix order: which are vLLM's, and which the tier's.

    Yields:
        Tokens of the prefix that ends with a block to load, and its key.
    """
    end = 0
    for block in blocks:
        end += block_size
        if block.block_id < 0:
            yield end, block.block_hash
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
        self._rests = False  # one of these rests on GPU blocks
        self._reused: set[int] = set()  # GPU blocks handed out since the first that does

    def get(self, request_id: str, num_tokens: int) -> LookupResult | None:
        """What a request of this length was found to hit, if it still holds."""
        result = self._new.get(request_id) or self._results.get(request_id)
        return result if result is not None and result.num_tokens == num_tokens else None

    def put(self, request_id: str, result: LookupResult) -> None:
        """Remember a lookup of this step, in place of an older one."""
        if request_id in self._results:
            self.forget(request_id)
        self._new[request_id] = result
        self._rests = self._rests or bool(result.gpu_blocks)

    def end_step(self) -> None:
        """What is left of this step's lookups is kept, unless a block was handed out meanwhile."""
        if not (self._new or self._reused):
            return
        for request_id, result in self._new.items():
            if result.only_given and not result.deferred:
                continue  # what was given is over
            if self._reused and any(b.block_id in self._reused for b in result.gpu_blocks):
                continue
            self._results[request_id] = result
            for block in result.gpu_blocks:
                self._by_block.setdefault(block.block_id, set()).add(request_id)
            for key in result.missing:
                self._by_key.setdefault(key, set()).add(request_id)
        self._new.clear()
        self._reused.clear()
        self._rests = False

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
        if self._rests:
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
        self._rests = False


def _discard(index: dict, item: Hashable, request_id: str) -> None:  # type: ignore[type-arg]
    if (waiting := index.get(item)) is not None:
        waiting.discard(request_id)
        if not waiting:
            del index[item]
