"""Blocks that a KV connector failed to fill, and what was computed upon them.

Blocks of a synchronous load are in the prefix cache, and are stored, in the step that loads them;
that the load has failed comes back with that step's output. vLLM then recomputes them in place and
leaves them in the prefix cache, or it fails the requests and takes them out of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import chain
from typing import Any

from kvoffload_patch.integration.engine.adapters.vllm_scheduler import SchedulerView
from kvoffload_patch.tier.manager import OffloadManager

_Cached = tuple[str, int, Hashable]  # request, GPU block id, key


class InvalidBlocks:
    """Takes out of the tier what a connector's failed load has left there.

    Args:
        view: the scheduler.
        manager: of the tier.

    Attributes:
        untrusted: key of each GPU block that was cached when it was said to be wrong. vLLM does not
            say when it has recomputed it, so it is not stored until it is handed out again, and
            leaves the prefix cache when nobody uses it any more.
    """

    def __init__(self, view: SchedulerView, manager: OffloadManager) -> None:
        self._view = view
        self._manager = manager
        self._in_flight: deque[tuple[Any, tuple[_Cached, ...]]] = deque()
        self.untrusted: dict[int, Hashable] = {}

    def step_scheduled(self, output: Any, cached: Iterable[tuple[Any, Sequence[Any]]]) -> None:
        """A step is scheduled beside a connector, and these blocks were cached for it."""
        blocks = [(one.request_id, block) for one, blocks in cached for block in blocks]
        keyed = [(name, block.block_id, block.block_hash) for name, block in blocks]
        self._in_flight.append((output, tuple(keyed)))

    def step_returned(self, output: Any) -> None:
        """A step's output is about to be taken in: steps before it are over."""
        while self._in_flight and self._in_flight[0][0] is not output:
            self._in_flight.popleft()

    def discard(self, gpu_block_ids: Collection[int]) -> None:
        """These GPU blocks were not filled in the step whose output is being taken in, or since.

        Of every request that has one of them, running or not, all keys from the first of them on
        are discarded. One that has ended or was preempted since that step, or whose window has left
        blocks behind, lacks blocks that it has cached since, upon which it may have computed others
        that it has: all that it has cached since that step is discarded. So is what others have
        computed upon any of these: a window shows them, and not what they were computed upon.
        """
        names = self._view.scheduler.requests
        tables = {name: self._view.block_tables(name) for name in names}
        wrong = set(gpu_block_ids)
        for name, cached in self._cached_since().items():
            has = set(chain(*tables.get(name, ())))
            if not has.issuperset([gpu_block_id for gpu_block_id, _ in cached]):
                for gpu_block_id, key in cached:
                    if self._distrust(gpu_block_id, key):
                        wrong.add(gpu_block_id)
        null, known = {self._view.pool.null_block.block_id}, 0
        wrong -= null
        while len(wrong) > known:
            known = len(wrong)
            for table in tables.values():
                wrong.update(self._from_first(table, wrong).difference(null))
        for gpu_block_id in wrong:
            self._distrust(gpu_block_id, self._view.cached_key(gpu_block_id))

    def _cached_since(self) -> dict[str, list[tuple[int, Hashable]]]:
        """What each request has cached since the step whose output is being taken in."""
        found: dict[str, list[tuple[int, Hashable]]] = {}
        for request_id, gpu_block_id, key in chain(*(cached for _, cached in self._in_flight)):
            found.setdefault(request_id, []).append((gpu_block_id, key))
        return found

    def _from_first(self, tables: Sequence[list[int]], gpu_block_ids: Collection[int]) -> set[int]:
        """The blocks of a request from the first of these on, in every KV cache group.

        A layer computes upon those before it, whichever group they are of: what one group lacks is
        in the blocks of all others from the same token on (vLLM 0.30 goes on with several groups).
        """
        begins: list[int] = []  # tokens before the first of these, in each group that has any
        for table, size in zip(tables, self._view.block_sizes):
            begins += [at * size for at, block in enumerate(table) if block in gpu_block_ids][:1]
        if not begins:
            return set()
        sized = zip(tables, self._view.block_sizes)
        return set(chain(*(table[min(begins) // size :] for table, size in sized)))

    def _distrust(self, gpu_block_id: int, key: Hashable) -> bool:
        """Discard a key; whether the GPU block still has it."""
        if key is None:
            return False
        self._manager.discard(key)
        has = self._view.still_cached(gpu_block_id, key)
        if has:
            self.untrusted[gpu_block_id] = key
        return has

    def take_out(self) -> None:
        """Take out of vLLM's prefix cache what nobody uses any more; before a step is scheduled.

        vLLM takes out blocks of the first request that has them, if it does not compute them again.
        It leaves those of a request that has ended meanwhile, and what others computed upon them.
        What is in use is computed again, or its request is about to end. O(blocks that were named
        by a failure and are in use since).
        """
        for gpu_block_id, key in list(self.untrusted.items()):
            if self._view.still_cached(gpu_block_id, key):
                block = self._view.pool.blocks[gpu_block_id]
                if block.ref_cnt:
                    continue
                self._view.adapter.uncache([block])
            del self.untrusted[gpu_block_id]

    def storable(self, gpu_block_id: int, key: Hashable) -> bool:
        """Whether a GPU block has, as far as is known, what the prefix cache says."""
        if self.untrusted.get(gpu_block_id) == key:
            return False
        return self._view.still_cached(gpu_block_id, key)

    def blocks_reused(self, gpu_block_ids: Iterable[int]) -> None:
        """These GPU blocks were handed out: what they held is gone."""
        for gpu_block_id in gpu_block_ids:
            self.untrusted.pop(gpu_block_id, None)

    def clear(self) -> None:
        """The prefix cache is empty."""
        self.untrusted.clear()
