"""Blocks that were used once and blocks that were used again, in two lists that adapt.

Adaptive replacement (Megiddo and Modha, 2003), with one change for prefixes: blocks are useful
together, so a request's blocks are together when it ends. What it computed behind a prefix that had
been used again counts as used again, too.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from kvoffload_patch.tier.policies.batches import BatchLists
from kvoffload_patch.tier.policies.lost import LostKeys

ONCE, AGAIN = 0, 1


class ArcPolicy:
    """Evicts from the list that is larger than its share.

    The keys of the last evictions are remembered, a third as many as there are slots. One that is
    computed again shows that the list which it left should have been larger: the share of
    that list grows, and the block counts as used again. This number, the third in `regroup` and the
    share at the start were chosen by replays (docs/policies.md).

    Attributes:
        share: slots that blocks used once may have.
    """

    def __init__(self, key_of: Sequence[Hashable]) -> None:
        self._key_of = key_of
        self._lists = BatchLists(2, len(key_of))
        self.share = len(key_of) / 8
        self._lost = LostKeys(2)
        self._came_back: set[Hashable] = set()  # evicted keys that are being stored again

    def grow(self) -> None:
        self.share += (len(self._key_of) - len(self._lists.batch_of)) / 8
        self._lists.grow(len(self._key_of))

    def miss(self, keys: Collection[Hashable]) -> None:
        lost = self._lost.of(keys)
        if not lost:
            return
        num_once, num_again = self._lost.counts
        if len(self._came_back) > len(self._key_of):
            self._came_back.clear()  # of blocks that found no room, or whose copies failed
        self._came_back.update(lost)
        once, again = self._lost.forget(lost)
        more = once * max(1.0, num_again / max(1, num_once))
        more -= again * max(1.0, num_once / max(1, num_again))
        self.share = min(max(self.share + more, 0.0), float(len(self._key_of)))

    def insert(self, slots: Sequence[int]) -> None:
        if not self._came_back:
            self._lists.add(ONCE, slots)
            return
        keys = list(map(self._key_of.__getitem__, slots))
        came_back = [slot for slot, key in zip(slots, keys) if key in self._came_back]
        self._came_back.difference_update(keys)
        others = set(slots).difference(came_back)
        self._lists.add(ONCE, [slot for slot in slots if slot in others])
        self._lists.add(AGAIN, came_back)

    def hit(self, slots: Sequence[int]) -> None:
        self._lists.make_recent(slots, AGAIN)

    def regroup(self, slots: Sequence[int]) -> None:
        numbers = list(filter(None, map(self._lists.batch_of.__getitem__, slots)))
        again = sum([number % 2 for number in numbers])
        together = 3 * again >= len(numbers)
        self._lists.make_recent(slots, AGAIN if together else None)

    def pin(self, slots: Sequence[int]) -> None:
        self._lists.take(slots)

    def unpin(self, slots: Sequence[int]) -> None:
        self._lists.add(AGAIN, slots)

    def remove(self, slots: Sequence[int]) -> None:
        self._lists.take(slots)

    def evict(self, count: int) -> Sequence[int]:
        lists = self._lists
        over = lists.sizes[ONCE] - int(self.share)
        once = lists.take_oldest(ONCE, min(count, over)) if over > 0 else []
        again = lists.take_oldest(AGAIN, count - len(once))
        if len(once) + len(again) < count:
            once += lists.take_oldest(ONCE, count - len(once) - len(again))
        self._remember(once, ONCE)
        self._remember(again, AGAIN)
        return once + again

    def _forget_all(self) -> None:
        """Nothing evicted is remembered any more."""
        self._lost.clear()
        self._came_back.clear()

    def _remember(self, slots: Sequence[int], which: int) -> None:
        """The keys of these slots have left a list."""
        keys = list(map(self._key_of.__getitem__, slots))
        self._lost.add(keys, which, len(self._key_of) // 3)
