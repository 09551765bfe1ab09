"""How much of each prefix the GPU keeps once nobody uses it."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import accumulate, compress
from math import ceil
from typing import NamedTuple, TypeVar

from kvoffload_patch.tier.recency_model import sample_marks, sample_of
from kvoffload_patch.tier.tuning import (
    HEADS_FREE_REQUESTS,
    HEADS_ROOM_REQUESTS,
    HEADS_SHOWN_REQUESTS,
    PREFIX_LEAD_PARTS,
    PREFIX_MARGIN_PARTS,
    PREFIX_PARTS,
    UNSEEN_PARTS,
    USES_MEMORY_TIMES,
    USES_PARTS,
    USES_SAMPLE_BLOCKS,
    USES_TIMES,
)

Key = TypeVar("Key", bound=Hashable)


class Hit(NamedTuple):
    """What a request has found, from its first block on.

    Attributes:
        blocks: on the GPU or in the tier.
        on_gpu: how many of these, from the first on, were on the GPU.
        uses: `PrefixShare.uses` then.
    """

    blocks: int
    on_gpu: int
    uses: int


NO_HIT = Hit(0, 0, 0)


class PrefixShare:
    """Which share of each prefix to keep on the GPU, its head, so that hits find most there.

    vLLM evicts what was used least recently. Where prefixes come back after more was used than the
    GPU holds, as those of conversations that take turns do, it has lost all of each by then. A GPU
    that keeps heads alone keeps them for longer: with a share p as long as one of 1 / p times the
    blocks keeps whole prefixes. So it finds a part ``p * H(blocks / p)`` of what is used, where H
    is the hit ratio of a cache that evicts what was used least recently, by its blocks: Talus with
    one cache of none (Beckmann and Sanchez, HPCA 2015). H comes from how much was used between two
    uses of a block, by the average eviction time (Hu and others, USENIX ATC 2016), of some blocks;
    old counts fade. How many blocks there are for heads is learned from which are still there when
    they are used again, and is no more than nobody uses: requests that run, and loads, take the
    rest.

    Args:
        gpu_blocks: of the GPU's prefix cache.

    Attributes:
        share: of each prefix; 1: all of it, as vLLM does by itself.
        uses: of all keys, by requests that have ended.
    """

    def __init__(self, gpu_blocks: int) -> None:
        self.share = 1.0
        self._one_in = sample_of(USES_TIMES * gpu_blocks, USES_SAMPLE_BLOCKS)  # keys
        # When each was used last, and the share with which it was kept, 0 where it was not; the
        # oldest first. Times are uses of all keys since the beginning.
        self._last = OrderedDict[Hashable, tuple[int, float]]()
        self.uses, self._due = 0, gpu_blocks
        self._bin = max(1, gpu_blocks // USES_PARTS)  # uses
        # Uses of the sample, as many as there should be, and those of them after so many bins.
        self._used = self._expected = 0.0
        self._used_again = [0.0] * (USES_PARTS * USES_TIMES)
        self._sizes: Sequence[float] = ()  # blocks that a cache needs to keep one for so many bins
        self._room = float(gpu_blocks)  # blocks for what is kept
        self._ended, self._free = 0, 0.0  # requests, and blocks that nobody used when the last did

    def ended(
        self,
        keys: Sequence[Key],
        hit: Hit,
        free: int,
        slots: int,
        whole: bool = False,
    ) -> Sequence[Key]:
        """A request has ended.

        Args:
            keys: that it used, head first.
            hit: what it found of them.
            free: blocks of the GPU that nobody uses.
            slots: of the tier: no head is kept for longer than the tier keeps its tail.
            whole: no tail is given up now.

        Returns:
            Those of its tail, which the GPU is not to keep.
        """
        kept = 1.0 if whole else self.share
        last, end = self._last, ceil(kept * len(keys))
        # Not by place: where all prefixes begin alike, one place would be looked at in all of them.
        marks = sample_marks(keys, self._one_in)
        sampled = list(compress(enumerate(keys), marks)) if 1 in marks else []
        self._count(sampled, hit)
        self.uses = uses = self.uses + len(keys)
        self._note_free(free)
        self._used += len(sampled)
        self._expected += len(keys) / self._one_in
        for place, key in sampled:
            last[key] = uses, kept if place < end else 0.0
            last.move_to_end(key)
        if uses >= self._due:
            bins = 1 + (uses - self._due) // self._bin
            self._due += bins * self._bin
            self._fade(bins)
            self._choose(slots)
        return keys[end:]

    def _note_free(self, free: int) -> None:
        """What requests use has no room for heads, from the first request on."""
        self._ended += 1
        self._free += (free - self._free) / min(self._ended, HEADS_FREE_REQUESTS)
        self._room += (self._free - self._room) / HEADS_ROOM_REQUESTS
        self._room = min(self._room, self._free)

    def _count(self, sampled: Iterable[tuple[int, Hashable]], hit: Hit) -> None:
        """How much was used between two uses of what was found, and for what room that stands."""
        last, counts = self._last, self._used_again
        kept = lost = 0.0  # blocks that what was still there stands for, and what should have been
        for place, key in sampled:
            if place >= hit.blocks:
                break
            if key not in last:
                continue
            used, share = last[key]
            bins = max(0, hit.uses - used) // self._bin  # another may have used it meanwhile
            if bins >= len(counts):
                continue
            counts[bins] += 1
            if share and bins < len(self._sizes):
                blocks = share * self._sizes[bins]
                if place < hit.on_gpu:
                    kept = max(kept, blocks)
                else:
                    lost = max(lost, blocks)
        known = min(lost, self._room) if lost else max(kept, self._room)
        self._room += (known - self._room) / HEADS_SHOWN_REQUESTS

    def _fade(self, bins: int) -> None:
        last, oldest = self._last, self.uses - self._bin * len(self._used_again)
        while last and next(iter(last.values()))[0] < oldest:
            last.popitem(last=False)
        left = (1 - 1 / (USES_PARTS * USES_MEMORY_TIMES)) ** bins
        self._used *= left
        self._expected *= left
        self._used_again = [count * left for count in self._used_again]

    def _choose(self, slots: int) -> None:
        hit_ratio, room = self._hit_ratio(), self._room
        best, most = 1.0, hit_ratio(room) + 1 / PREFIX_LEAD_PARTS
        smaller = room * (1 - 1 / PREFIX_MARGIN_PARTS)
        for part in range(PREFIX_PARTS - 1, 0, -1):
            share = part / PREFIX_PARTS
            if room / share > slots:
                break
            if (found := share * hit_ratio(smaller / share)) > most:
                best, most = share, found
        self.share = best

    def _hit_ratio(self) -> Callable[[float], float]:
        """What a cache of so many blocks finds, which evicts what was used least recently."""
        seen = min(self.uses // self._bin, len(self._used_again))
        used = max(self._expected, 1.0)
        soon, *later = self._used_again[:seen]
        # Blocks that all prefixes begin with are used again at once, and the sample has too many or
        # too few of them (SHARDS-adj; Waldspurger and others, FAST 2015).
        soon = max(0.0, soon + self._expected - self._used)
        found = [again / used for again in accumulate([soon, *later])]
        if found[-1] > 1:  # they grow
            found = [min(part, 1.0) for part in found]
        self._sizes = sizes = list(accumulate([self._bin * (1 - part) for part in found]))
        most = found[-1]
        if seen < len(self._used_again):
            most += (1 - most) / UNSEEN_PARTS

        def ratio(blocks: float) -> float:
            at = bisect_left(sizes, blocks)
            return found[at] if at < seen else most

        return ratio
