"""A router's side of KV cache events: what an engine would find of a prompt, from events alone.

It knows what is on the wire, and of a request its tokens, its salt and its adapter. As llm-d's
indexer does, it takes a block for what its parent and its tokens say, so one whose parent nobody
holds is lost to it; and it counts how often a block was stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import msgspec

Groups = Sequence[tuple[str, int]]  # kind of each, and its window; "full", "window" or "state"


class Router:
    """What one engine holds, as far as batches of events say it.

    Args:
        block_size: tokens of a block.

    Attributes:
        held: how often each block is held, by medium, hash and group.
        seen: blocks, by kind of event and medium.
        wrong: blocks, by what no engine should say of them.
        fields: what the release says of blocks that it stores.
    """

    def __init__(self, block_size: int) -> None:
        from vllm.distributed.kv_events import BlockStored, KVEventBatch

        self.fields = frozenset(BlockStored.__struct_fields__)
        self._size = block_size
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self.held: Counter[tuple[str, Any, int]] = Counter()
        self._holders: Counter[Any] = Counter()  # by hash, whatever the medium and the group
        self._block: dict[tuple[Any, ...], Any] = {}  # hash, by parent, tokens and extra keys
        self._about: dict[Any, tuple[Any, ...]] = {}
        self._lost: set[tuple[str, Any, int]] = set()
        self.seen, self.wrong = Counter[str](), Counter[str]()

    def take(self, batch: Any) -> None:
        """A batch is published, of which what goes over the wire comes here.

        Before 0.10.2 hashes are numbers, which with SHA-256 are too large for the wire.
        """
        if "medium" in self.fields:
            batch = self._decode(self._encode(batch))
        for event in deepcopy(batch.events):
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                for gone in (self.held, self._holders, self._block, self._about, self._lost):
                    gone.clear()
                continue
            self.seen[f"{kind} {_medium(event)}"] += len(event.block_hashes)
            if kind == "BlockStored":
                self._stored(event)
            else:
                self._removed(event)

    def _stored(self, event: Any) -> None:
        hashes, size, parent = event.block_hashes, event.block_size, event.parent_block_hash
        whole = size == self._size and len(event.token_ids) == size * len(hashes)
        medium, group = _medium(event), getattr(event, "group_idx", None) or 0
        if whole and parent is not None and parent not in self._holders:
            self.wrong[f"{medium}: behind a block that nobody holds"] += len(hashes)
            self._lost.update((medium, one, group) for one in hashes)
            return
        extra = getattr(event, "extra_keys", None) or [None] * len(hashes)
        adapter = getattr(event, "lora_name", event.lora_id)
        for nth, one in enumerate(hashes):
            if whole:
                tokens = tuple(event.token_ids[nth * size : (nth + 1) * size])
                others = tuple(key for key in extra[nth] or () if key != adapter)
                about = parent, tokens, others, adapter
                self._block[about] = one
                if self._about.setdefault(one, about) != about:
                    self.wrong["described in two ways"] += 1
            place = medium, one, group
            self.held[place] += 1
            self._holders[one] += 1
            if medium == "CPU" and self.held[place] > 1:
                self.wrong["stored twice"] += 1
            parent = one

    def _removed(self, event: Any) -> None:
        medium = _medium(event)
        for one in event.block_hashes:
            place = medium, one, getattr(event, "group_idx", None) or 0
            if place in self._lost:
                self._lost.discard(place)
                continue
            if not self.held[place]:
                self.wrong[f"removed from {medium}, where it was not"] += 1
                continue
            for count, key in ((self.held, place), (self._holders, one)):
                count[key] -= 1
                if not count[key]:
                    del count[key]
            if one not in self._holders and one in self._about:
                del self._block[self._about.pop(one)]

    def predict(self, tokens: list[int], salt: Any, adapter: Any, groups: Groups) -> list[int]:
        """Tokens of a prompt that are found: on the GPU alone, and there or in CPU memory."""
        hashes = self._chain(tokens[:-1], salt, adapter)
        return [self._longest(hashes, groups, media) for media in (("GPU",), ("GPU", "CPU"))]

    def _chain(self, tokens: list[int], salt: Any, adapter: Any) -> list[Any]:
        """Hashes of a prompt's blocks, as far as the router knows them."""
        found, parent, size = list[Any](), None, self._size
        for begin in range(0, len(tokens) - size + 1, size):
            extra = (salt,) * bool(salt and not begin)
            parent = self._block.get((parent, tuple(tokens[begin : begin + size]), extra, adapter))
            if parent is None:
                break
            found.append(parent)
        return found

    def _longest(self, hashes: list[Any], groups: Groups, media: tuple[str, ...]) -> int:
        """The longest prefix of which each group has what it reads."""
        has = [[any((m, one, g) in self.held for m in media) for one in hashes]
               for g in range(len(groups))]  # fmt: skip
        for blocks in range(len(hashes), 0, -1):
            if all(
                all(has[g][max(0, blocks - self._read(group)) : blocks])
                for g, group in enumerate(groups)
            ):
                return blocks * self._size
        return 0

    def _read(self, group: tuple[str, int]) -> int:
        kind, window = group
        if kind == "window":
            return -(-(window - 1) // self._size)
        return 1 if kind == "state" else 1 << 30


def _medium(event: Any) -> str:
    return getattr(event, "medium", None) or "GPU"
