"""Lookups that vLLM need not repeat.

`schedule` looks up the prefix of each request that it admits, which the tier has done just before:
hundreds of blocks, in the way of the step. So what a lookup found is kept, with loaded blocks in
the places of what only the tier had, and vLLM is given that when it asks for the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

# So many keys that were found nowhere are looked for again: each could make a longer hit possible.
_MAX_MISSING = 8


class Lookup(NamedTuple):
    """One call of `KVCacheCoordinator.find_longest_cache_hit`.

    ``result``: blocks by KV cache group, tokens, and from 0.26 on one number more.
    """

    block_hashes: Any
    max_length: int
    result: tuple[Any, ...]


class Answer(NamedTuple):
    """What a lookup gives once everything that it found is on the GPU.

    Attributes:
        lookup: the lookup; the request's list of hashes is what it is recognised by.
        groups: GPU blocks by KV cache group.
        keys: under which they are in the prefix cache, all groups together.
        missing: arguments of `BlockPool.get_cached_block` that found nothing.
    """

    lookup: Lookup
    groups: tuple[list[Any], ...]
    keys: list[Hashable]
    missing: tuple[tuple[Hashable, list[int]], ...]


def answer_of(
    lookup: Lookup | None,
    missing: Sequence[tuple[Hashable, list[int]]],
    loaded: Mapping[Hashable, Any],
) -> Answer | None:
    """The answer to be given, or None if looking up anew is as good.

    Args:
        lookup: what was looked up, if anything was.
        missing: what was found nowhere then.
        loaded: GPU block for each key that only the tier had, in the prefix cache or about to be.
    """
    if lookup is None or not lookup.result[1] or len(missing) > _MAX_MISSING:
        return None
    groups = tuple(
        [loaded[block.block_hash] if block.block_id < 0 else block for block in blocks]
        for blocks in lookup.result[0]
    )
    keys = [block.block_hash for blocks in lookup.result[0] for block in blocks]
    return Answer(lookup, groups, keys, tuple(missing))


class Answers:
    """Stands in for one coordinator's `find_longest_cache_hit`.

    An answer is given only if looking up anew would give the same: every block is still in the
    prefix cache under its key, and what was missing still is.

    Args:
        coordinator: a `vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator`.
    """

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self._look_up = coordinator.find_longest_cache_hit
        self._given: dict[int, Answer] = {}  # by id() of the list of hashes, which they refer to
        self._recording = False
        self._recorded: Lookup | None = None
        coordinator.find_longest_cache_hit = self._find

    def close(self) -> None:
        """The coordinator looks everything up by itself again."""
        self._given.clear()
        self._coordinator.__dict__.pop("find_longest_cache_hit", None)

    def record(self) -> None:
        """From now on look up whatever is asked for, and remember it; `recorded` ends that."""
        self._recording, self._recorded = True, None

    def recorded(self) -> Lookup | None:
        """The last lookup since `record`, if there was any."""
        self._recording = False
        return self._recorded

    def give(self, answer: Answer | None) -> None:
        """Give this answer when it is asked for, until `end_step`."""
        if answer is not None:
            self._given[id(answer.lookup.block_hashes)] = answer

    def end_step(self) -> None:
        """`schedule` has returned."""
        self._given.clear()

    def _find(self, block_hashes: Any, max_cache_hit_length: int) -> tuple[Any, ...]:
        if not self._recording:
            answer = self._given.get(id(block_hashes))
            if answer is not None and self._holds(answer, max_cache_hit_length):
                return (tuple(map(list, answer.groups)), *answer.lookup.result[1:])
        found: tuple[Any, ...] = self._look_up(block_hashes, max_cache_hit_length)
        if self._recording:
            # A copy: what the caller does to its own must not be done to an answer twice.
            kept = (tuple(map(list, found[0])), *found[1:])
            self._recorded = Lookup(block_hashes, max_cache_hit_length, kept)
        return found

    def _holds(self, answer: Answer, max_length: int) -> bool:
        if answer.lookup.max_length != max_length:
            return False
        if [block.block_hash for blocks in answer.groups for block in blocks] != answer.keys:
            return False
        cached = self._coordinator.block_pool.get_cached_block
        return not any(cached(block_hash, groups) for block_hash, groups in answer.missing)
