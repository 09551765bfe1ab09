"""What the tier says in vLLM's own stream of KV cache events, release by release.

vLLM tells routers which blocks its GPU cache gains and loses, from `cache_full_blocks` and when
blocks are reused. The tier tells what it holds itself, with medium CPU, and which blocks it loads
into the GPU's cache, which vLLM does not notice. Both are made of the event in which vLLM first
told of a block, so that they have whatever fields a release has: its tokens, its parent, adapters.

Routers as a rule take a block for what its parent and its tokens say, and pass over one whose
parent they do not know. So none of the tier is told of before its parent is on the GPU or told of
itself, in the layers that read a whole prefix. Until then no request can hit it.

By feature: up to 0.10.1 events have no medium, so that the tier's blocks would be taken for the
GPU's: there only what is loaded is told.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

MEDIUM = "CPU"
_LOCAL = "LOCAL"  # held on the publisher's own host, as vLLM's own offloading says
# For each block that is told of, where a release has such a field.
_PER_BLOCK = ("extra_keys", "lookahead_token_ids")


class _Told(NamedTuple):
    """Where vLLM told of a block: in this event, as its block ``position``, hash ``nth``.

    They differ behind blocks that a sliding window has left, which have tokens and no hash.
    ``parent``: the hash of the block before it; ``chained``: whether that is known. ``before``: a
    key of that block, without which this one is not hit; None: it may be.
    """

    event: Any
    position: int
    nth: int
    parent: Any
    chained: bool
    before: Hashable


class _New(NamedTuple):
    """What `cached` was told; ``before``: as `_Told` has it, for each of ``keys``."""

    event: Any
    keys: list[Hashable]
    before: list[Hashable]


class _Announced(NamedTuple):
    """Under which name a block was said to be in the tier; it leaves under the same."""

    group: Any
    name: Any


class KVEvents:
    """Adds the tier's events to the queue of a block pool, in the order in which things happen.

    A block that vLLM has not told of, or that was forgotten, is not told of; it raises nothing.

    Args:
        pool: a `vllm.v1.core.block_pool.BlockPool` with KV cache events on.
        needed: whether the GPU or the tier has a key, or is about to.
        on_gpu: whether the GPU has it.
        whole: KV cache groups that read all of a prefix.
        key: makes a key of a block's hash, in such a group whose blocks have a hash each; None:
            there is none.
    """

    def __init__(
        self,
        pool: Any,
        needed: Callable[[Hashable], bool],
        on_gpu: Callable[[Hashable], bool],
        whole: Sequence[int],
        key: Callable[[Any], Hashable] | None,
    ) -> None:
        from vllm.distributed import kv_events

        self._pool = pool
        self._needed, self._on_gpu, self._whole, self._key = needed, on_gpu, whole, key
        self._hash_size = getattr(pool, "hash_block_size", None)
        self._stored_event = kv_events.BlockStored
        self._removed_event = kv_events.BlockRemoved
        self._fields = frozenset(kv_events.BlockStored.__struct_fields__)
        self._removed_fields = frozenset(kv_events.BlockRemoved.__struct_fields__)
        self._new: list[_New] = []
        self._told: OrderedDict[Hashable, _Told] = OrderedDict()
        self._in_tier: dict[Hashable, _Announced] = {}
        # Blocks of the tier that are not told of yet, by the one before them, and the other way.
        self._behind: dict[Hashable, dict[Hashable, None]] = {}
        self._waits: dict[Hashable, Hashable] = {}

    def cached(
        self, request: Any, blocks: Sequence[Any], begin: int, end: int, size: int, group: int
    ) -> None:
        """vLLM has just put these blocks of a request, of all it has, into its prefix cache."""
        queue = self._pool.kv_event_queue
        if begin >= end or not queue or not isinstance(queue[-1], self._stored_event):
            return
        keys = [block.block_hash for block in blocks[begin:end]]
        before: list[Hashable] = [None] * len(keys)
        if group in self._whole:
            before = [blocks[begin - 1].block_hash if begin else None, *keys[:-1]]
        elif self._key is not None and size == self._hash_size:
            hashes = request.block_hashes[max(0, begin - 1) : end - 1]
            before = [None] * (not begin) + [*map(self._key, hashes)]
        self._new.append(_New(queue[-1], keys, before))

    def take_in(self) -> None:
        """Note what was cached since the last call; O(blocks cached).

        For each of them two older ones are looked at, and forgotten if nobody has them any more, so
        that at most about twice as many are kept as the GPU and the tier have.
        """
        for new in self._new:
            if len(new.event.block_hashes) == len(new.keys) - new.keys.count(None):
                self._note(*new)
            # Otherwise it tells of other blocks than these.
        if self._behind:
            self._followed(key for new in self._new for key in new.keys)
        self._new.clear()

    def _note(self, event: Any, keys: list[Hashable], before: list[Hashable]) -> None:
        nth, parent, chained = 0, event.parent_block_hash, True
        for position, key in enumerate(keys):
            if key is None:
                chained = False
                continue
            self._told[key] = _Told(event, position, nth, parent, chained, before[position])
            self._told.move_to_end(key)
            parent, chained = event.block_hashes[nth], True
            nth += 1
        self._forget(min(2 * nth, len(self._told) - nth))

    def _forget(self, count: int) -> None:
        for _ in range(count):
            oldest = next(iter(self._told))
            if self._needed(oldest):
                self._told.move_to_end(oldest)
            else:
                del self._told[oldest]

    def loaded(self, keys: Sequence[Hashable]) -> None:
        """The tier has put these into the GPU's prefix cache."""
        self._pool.kv_event_queue += self._stored(keys)
        if self._behind:
            self._followed(keys)

    def stored(self, keys: Iterable[Hashable]) -> None:
        """These can be loaded from the tier from now on."""
        if "medium" in self._fields:
            more = {"medium": MEDIUM}
            if "locality" in self._fields:
                more["locality"] = _LOCAL
            self._pool.kv_event_queue += self._stored(self._announced(keys), **more)

    def _announced(self, keys: Iterable[Hashable]) -> list[Hashable]:
        """Which of these can be told of now, and those that have waited for them, in order."""
        found, todo = list[Hashable](), list(keys)[::-1]
        while todo:
            key = todo.pop()
            if (told := self._told.get(key)) is None:
                continue
            before = told.before
            if before is None or before in self._in_tier or self._on_gpu(before):
                group = getattr(told.event, "group_idx", None)
                self._in_tier[key] = _Announced(group, told.event.block_hashes[told.nth])
                found.append(key)
                todo += self._take_behind(key)
            else:
                self._behind.setdefault(before, {})[key] = None
                self._waits[key] = before
        return found

    def _followed(self, keys: Iterable[Hashable]) -> None:
        """The GPU has these: what has waited for them is told of."""
        self.stored([behind for key in keys for behind in self._take_behind(key)])

    def _take_behind(self, key: Hashable) -> list[Hashable]:
        behind = [*self._behind.pop(key, ())]
        for one in behind:
            del self._waits[one]
        return behind

    def _give_up(self, key: Hashable) -> None:
        """It has left the tier, and was not told of."""
        if (before := self._waits.pop(key, None)) is not None:
            del self._behind[before][key]
            if not self._behind[before]:
                del self._behind[before]

    def left(self, keys: Iterable[Hashable]) -> None:
        """These are not in the tier any more, of which some could never be loaded."""
        by_group: dict[Any, list[Any]] = {}
        for key in keys:
            if (announced := self._in_tier.pop(key, None)) is not None:
                by_group.setdefault(announced.group, []).append(announced.name)
            elif self._waits:
                self._give_up(key)
        for group, hashes in by_group.items():
            about = {"group_idx": group, "locality": _LOCAL}
            known = {name: value for name, value in about.items() if name in self._removed_fields}
            event = self._removed_event(block_hashes=hashes, medium=MEDIUM, **known)
            self._pool.kv_event_queue.append(event)

    def withdraw(self) -> None:
        """There is no tier any more; whatever state this is in."""
        self.left([*self._in_tier, *self._waits])

    def _stored(self, keys: Iterable[Hashable], **more: str) -> list[Any]:
        return [self._event(first, last, more) for first, last in self._runs(keys)]

    def _runs(self, keys: Iterable[Hashable]) -> Iterator[tuple[_Told, _Told]]:
        """First and last of the blocks that were told of one behind the other."""
        first = last = None
        for key in keys:
            told = self._told.get(key)
            if told is None:
                continue
            if first is None or last is None:
                first = told
            elif told.event is not last.event or told.position != last.position + 1:
                yield first, last
                first = told
            last = told
        if first is not None and last is not None:
            yield first, last

    def _event(self, first: _Told, last: _Told, more: dict[str, str]) -> Any:
        event, hashes = first.event, slice(first.nth, last.nth + 1)
        changes: dict[str, Any] = {"block_hashes": event.block_hashes[hashes], **more}
        if "session_id" in self._fields:
            changes["session_id"] = None  # the one that stores or loads it now is another
        per_block = [name for name in _PER_BLOCK if name in self._fields]
        if first.chained:
            size = event.block_size
            tokens = event.token_ids[first.position * size : (last.position + 1) * size]
            changes.update(token_ids=tokens, parent_block_hash=first.parent)
            for name in per_block:
                changes[name] = (getattr(event, name) or None) and getattr(event, name)[hashes]
        else:
            # As vLLM's own connectors tell of a block that they cannot describe.
            changes.update(dict.fromkeys(per_block), token_ids=[], block_size=0)
            changes["parent_block_hash"] = None
        told = copy.copy(event)
        for field, value in changes.items():
            setattr(told, field, value)
        return told
