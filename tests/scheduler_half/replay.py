"""Replays vLLM's stream of KV cache events as a router would, and compares it with both caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from functools import cache
from typing import Any


class Replay:
    """What the events of a scheduler say is on the GPU and in the tier.

    Args:
        scheduler: vLLM's.
        listens: whether its events are turned on, and come here. It is to have run nothing yet.
    """

    def __init__(self, scheduler: Any, listens: bool = True) -> None:
        self.held: dict[str, Counter[Hashable]] = {"GPU": Counter(), "CPU": Counter()}
        self.seen: Counter[str] = Counter()  # blocks, by kind of event and medium
        self._block: dict[Hashable, Any] = {}  # how each block was described first
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        if listens:
            listen(scheduler, self)

    def publish(self, batch: Any) -> None:
        """As an `EventPublisher`."""
        for event in batch.events:
            self._take(event)

    def shutdown(self) -> None:
        """As an `EventPublisher`."""

    def check(self, tier: Any = None) -> None:
        """Compare with what the GPU's cache and the tier, an `OffloadManager`, have now."""
        for event in self._pool.kv_event_queue:
            self._take(event)
        self._pool.kv_event_queue = []
        for medium, there in held(self._pool, tier).items():
            said = +self.held[medium]
            assert said == there, (
                f"{medium}: {len(said - there)} only in the stream, {len(there - said)} not in it"
            )

    def _take(self, event: Any) -> None:
        medium = getattr(event, "medium", None) or "GPU"
        held = self.held[medium]
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            for counts in self.held.values():
                counts.clear()
            return
        group = (getattr(event, "group_idx", None),) if _has_group() else ()
        keys = [(block_hash, *group) for block_hash in event.block_hashes]
        self.seen[f"{kind} {medium}"] += len(keys)
        if kind == "BlockStored":
            held.update(keys)
            self._compare_descriptions(event, keys)
            return
        assert kind == "BlockRemoved"
        held.subtract(keys)
        assert all(held[key] >= 0 for key in keys), "a block was removed that was not there"

    def _compare_descriptions(self, event: Any, keys: list[Hashable]) -> None:
        size = event.block_size
        if len(event.token_ids) != size * len(keys):
            return  # of a sliding window: what is left of it cannot be told from the rest
        parent = event.parent_block_hash
        extra = getattr(event, "extra_keys", None) or [None] * len(keys)
        assert len(extra) == len(keys)
        for nth, key in enumerate(keys):
            tokens = tuple(event.token_ids[nth * size : (nth + 1) * size])
            about = parent, tokens, size, event.lora_id, extra[nth]
            if size:
                assert self._block.setdefault(key, about) == about, "described in two ways"
            parent = event.block_hashes[nth]


def held(pool: Any, tier: Any) -> dict[str, Counter[Hashable]]:
    """What both caches have, as events name it; ``tier``: an `OffloadManager`, or None.

    Raises:
        AssertionError: a block of the tier is not told of, which nothing keeps back any more.
    """
    on_gpu = [*_cached_keys(pool)]
    events = tier.on_left.__self__ if tier else None  # `KVEvents`
    waits = events._waits if events else {}
    readable = [key for key in (tier._slot_of if tier else ()) if tier.lookup(key)]
    readable = [key for key in readable if key not in waits]
    # What a step's output put into the GPU's cache is looked at in the next step, whose events
    # are published together with those of that output.
    not_looked_at = {key for new in (events._new if events else ()) for key in new.keys}
    assert not {*waits.values()} & {*readable, *on_gpu} - not_looked_at, "told of too late"
    in_tier = readable if _has_medium() else []
    return {"GPU": Counter(map(_outside, on_gpu)), "CPU": Counter(map(_outside, in_tier))}


def listen(scheduler: Any, publisher: Any) -> None:
    """Turn on a scheduler's events; ``publisher``: an `EventPublisher`, which gets them."""
    manager = scheduler.kv_cache_manager
    manager.block_pool.enable_kv_cache_events = True
    if hasattr(manager, "enable_kv_cache_events"):  # from 0.26 on
        manager.enable_kv_cache_events = True
    scheduler.kv_event_publisher = publisher


def _cached_keys(pool: Any) -> Iterable[Any]:
    """The keys of each cached GPU block; one that several blocks have, for each of them."""
    more = getattr(pool, "cached_block_hashes_by_block", {})  # of hits within a block
    keys = [block.block_hash for block in pool.blocks if block.block_hash is not None]
    return keys + [key for block_id in more for key in more[block_id]]


@cache  # of the keys of a run, which are looked at in each of its steps
def _outside(key: Any) -> Hashable:
    """A key as events have it."""
    from vllm.v1.core import kv_cache_utils as utils

    if not hasattr(utils, "maybe_convert_block_hash"):  # up to 0.10.1
        return (key.get_hash_value(),)
    group = (utils.get_group_id(key),) if _has_group() else ()
    return (utils.maybe_convert_block_hash(utils.get_block_hash(key)), *group)


@cache
def _has_medium() -> bool:
    from vllm.distributed.kv_events import BlockStored

    return "medium" in BlockStored.__struct_fields__


@cache
def _has_group() -> bool:
    from vllm.distributed.kv_events import BlockStored

    return "group_idx" in BlockStored.__struct_fields__
