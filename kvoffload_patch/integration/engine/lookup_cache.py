"""What is known of waiting requests, until something that they could hit has changed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from kvoffload_patch.integration.engine.lookup_replay import Answer


@dataclass(frozen=True)
class Known:
    """A lookup that need not be repeated as long as nothing that it rests on has changed.

    Attributes:
        num_tokens: the request's length at the lookup.
        hit_tokens: length of the prefix found.
        gpu_blocks: vLLM's blocks of that prefix.
        missing: keys that were found nowhere; any of them would make a longer hit possible.
        cpu_hits: blocks that only the tier had.
        arriving: whether some of the prefix was on its way to the GPU.
        settled: the request fitted, and there was nothing to load. Otherwise it is looked up
            again once it fits, because what the tier had may have been evicted meanwhile.
        answer: what vLLM is given when it looks the request up; None has it look.
    """

    num_tokens: int
    hit_tokens: int
    gpu_blocks: tuple[Any, ...]
    missing: tuple[Hashable, ...]
    cpu_hits: int = 0
    arriving: bool = False
    settled: bool = True
    answer: Answer | None = None


class LookupCache:
    """Lookups by request, dropped when a block they rest on is reused or a key they lack stored.

    Most requests that are looked up are admitted in the same step. So a lookup costs O(1) until
    `end_step`, and O(1) for each of its blocks and keys then, if its request still waits.
    """

    def __init__(self) -> None:
        self._known: dict[str, Known] = {}
        self._by_block: dict[int, set[str]] = {}
        self._by_key: dict[Hashable, set[str]] = {}
        self._new: dict[str, Known] = {}  # of this step, not in the indexes yet
        self._reused: set[int] = set()  # GPU blocks handed out since the first of them

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._new or request_id in self._known

    def __len__(self) -> int:
        return len(self._known) + len(self._new)

    def get(self, request_id: str, num_tokens: int) -> Known | None:
        """What is known of a request of this length, if it still holds."""
        known = self._new.get(request_id) or self._known.get(request_id)
        return known if known is not None and known.num_tokens == num_tokens else None

    def put(self, request_id: str, known: Known) -> None:
        """Remember a lookup of this step, in place of an older one."""
        self.forget(request_id)
        self._new[request_id] = known

    def end_step(self) -> None:
        """What is left of this step's lookups is kept, unless a block was handed out meanwhile."""
        for request_id, known in self._new.items():
            if self._reused and any(b.block_id in self._reused for b in known.gpu_blocks):
                continue
            self._known[request_id] = known
            for block in known.gpu_blocks:
                self._by_block.setdefault(block.block_id, set()).add(request_id)
            for key in known.missing:
                self._by_key.setdefault(key, set()).add(request_id)
        self._new.clear()
        self._reused.clear()

    def forget(self, request_id: str) -> None:
        """The request no longer waits, or must be looked up again."""
        self._new.pop(request_id, None)
        known = self._known.pop(request_id, None)
        if known is None:
            return
        for block in known.gpu_blocks:
            _discard(self._by_block, block.block_id, request_id)
        for key in known.missing:
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
        for index in (self._known, self._by_block, self._by_key, self._new):
            index.clear()
        self._reused.clear()


def _discard(index: dict, item: Hashable, request_id: str) -> None:  # type: ignore[type-arg]
    waiting = index.get(item)
    if waiting is not None:
        waiting.discard(request_id)
        if not waiting:
            del index[item]
