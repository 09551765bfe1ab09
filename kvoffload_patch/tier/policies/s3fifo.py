"""A small queue for blocks that are new, a main one for those that were used again.

S3-FIFO (Yang and others, 2023). It moves nothing when a block is used, and knows no prefixes.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from itertools import compress

from kvoffload_patch.tier.policies.batches import BatchLists
from kvoffload_patch.tier.policies.lost import LostKeys
from kvoffload_patch.tier.tuning import ROUND_TIMES, USED_TIMES

SMALL, MAIN = 0, 1


class S3FifoPolicy:
    """S3-FIFO (Yang and others, 2023): a small queue for what is new, a main one, and a memory.

    A tenth of the slots are the small queue's. What was not used in it leaves the tier and is
    remembered; what was, and what comes again while it is remembered, goes to the main queue.
    There a block that was used since goes round again, three times at most: a round for each use.
    In one eviction so many go round for each block that is to leave, and no more, because all of a
    large tier may have been used since. Then the oldest leave, used or not: those that came first
    in the queue whose turn it is.
    """

    def __init__(self, key_of: Sequence[Hashable]) -> None:
        self._key_of = key_of
        self._queues = BatchLists(2, len(key_of))
        self._uses = [0] * len(key_of)  # by slot; 0 of what is in no queue and not pinned
        self._lost = LostKeys(1)

    def grow(self) -> None:
        self._queues.grow(len(self._key_of))
        self._uses += [0] * (len(self._key_of) - len(self._uses))

    def miss(self, keys: Collection[Hashable]) -> None:
        """A key that is remembered is looked for when it is stored."""

    def insert(self, slots: Sequence[int]) -> None:
        keys = list(map(self._key_of.__getitem__, slots))
        lost = self._lost.of(keys)
        if not lost:
            self._queues.add(SMALL, slots)
            return
        self._lost.forget(lost)
        back = [key in lost for key in keys]
        self._queues.add(MAIN, list(compress(slots, back)))
        self._queues.add(SMALL, [slot for slot, again in zip(slots, back) if not again])

    def hit(self, slots: Sequence[int]) -> None:
        uses, queued = self._uses, self._queues.batch_of
        for slot in slots:
            if queued[slot] and uses[slot] < USED_TIMES:
                uses[slot] += 1

    def regroup(self, slots: Sequence[int]) -> None:
        """What is stored in one step leaves in its order; what a request used has no other."""

    def pin(self, slots: Sequence[int]) -> None:
        self._queues.take(slots)

    def unpin(self, slots: Sequence[int]) -> None:
        uses = self._uses
        for slot in slots:
            if uses[slot] < USED_TIMES:
                uses[slot] += 1
        self._queues.add(MAIN, slots)

    def remove(self, slots: Sequence[int]) -> None:
        self._queues.take(slots)
        for slot in slots:
            self._uses[slot] = 0

    def evict(self, count: int) -> Sequence[int]:
        evicted: list[int] = []
        rounds = ROUND_TIMES * count
        while (missing := count - len(evicted)) > 0:
            chosen, which = self._oldest(missing)
            if not chosen:
                break
            if any(map(self._uses.__getitem__, chosen)):
                taken, chosen = chosen, self._go_round(chosen, which, rounds)
                rounds -= len(taken) - len(chosen)
            if which == SMALL:
                keys = list(map(self._key_of.__getitem__, chosen))
                self._lost.add(keys, 0, len(self._key_of))
            evicted += chosen
        return evicted

    def _oldest(self, count: int) -> tuple[list[int], int]:
        """Take so many at most that came first, of the queue that is to give some up now."""
        over = self._queues.sizes[SMALL] - len(self._key_of) // 10
        if over > 0:
            return self._queues.take_oldest(SMALL, min(count, over)), SMALL
        if self._queues.sizes[MAIN]:
            return self._queues.take_oldest(MAIN, count), MAIN
        return self._queues.take_oldest(SMALL, 1), SMALL  # if it was used, there is a main queue

    def _go_round(self, slots: Sequence[int], which: int, most: int) -> list[int]:
        """Those of these that were used since go to the end of the main queue, so many at most.

        Returns:
            The rest, in its order; it has no uses any more.
        """
        uses, batch_of = self._uses, self._queues.batch_of
        used = [slot for slot in slots if uses[slot]]
        for slot in used[:most]:
            uses[slot] = 0 if which == SMALL else uses[slot] - 1
        for slot in used[most:]:
            uses[slot] = 0
        self._queues.add(MAIN, used[:most])
        return [slot for slot in slots if not batch_of[slot]]
