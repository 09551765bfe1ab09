"""Slots in the order of their use, kept in batches, in one list or in several."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import groupby, islice


class _Batch:
    """Slots that were used together, the first to be evicted first.

    ``slots[:begin]`` and those that were used since are no part of it any more; ``left`` are.
    ``used`` says when that was: a larger number is later.
    """

    __slots__ = ("begin", "left", "slots", "used")

    def __init__(self, slots: list[int], used: int) -> None:
        self.slots = slots
        self.used = used
        self.begin = 0
        self.left = len(slots)


class BatchLists:
    """Lists of slots, each slot in one of them at most.

    Slots that were used together stay together: a number for each says which batch it belongs to,
    and with that to which list. A batch that is used again as a whole is moved as one.

    Args:
        lists: how many there are.
        slots: how many there are.

    Attributes:
        sizes: slots in each list.
        batch_of: for each slot, the number of its batch, which is that of its list modulo the
            number of lists; 0 where it is in none.
    """

    def __init__(self, lists: int, slots: int) -> None:
        self.sizes = [0] * lists
        self.batch_of = [0] * slots
        self._lists = [OrderedDict[int, _Batch]() for _ in range(lists)]  # the oldest batch first
        self._last = 0

    def grow(self, slots: int) -> None:
        """There are so many slots from now on, none fewer than before."""
        self.batch_of += [0] * (slots - len(self.batch_of))

    def add(self, which: int, slots: Sequence[int]) -> None:
        """These, which are in no list, become the most recent of one, the last most of all."""
        if not slots:
            return
        self._last += len(self._lists)
        number, batch_of = self._last + which, self.batch_of
        fill(batch_of, slots, number)
        self._lists[which][number] = _Batch(list(slots), number)
        self.sizes[which] += len(slots)

    def make_recent(self, slots: Sequence[int], which: int | None = None) -> None:
        """Those of these that are in a list become the most recent, the last most of all.

        Args:
            slots: one that is there twice counts where it is last.
            which: the list to which they all go; None: each stays in its own.
        """
        if not isinstance(slots, range) and len(set(slots)) < len(slots):
            slots = list(dict.fromkeys(reversed(slots)))[::-1]
        lists, batch_of = self._lists, self.batch_of
        loose: list[int] = []
        end = 0
        for number, run in groupby(map(batch_of.__getitem__, slots)):
            begin, end = end, end + len(list(run))
            if not number:
                continue
            some, home = slots[begin:end], number % len(lists)
            batch = lists[home][number]
            # Whole is what has all that is left of it, in its order.
            if batch.left > len(some) or batch.slots[batch.begin :] != list(some):
                loose += some
                continue
            self._move(loose, which)
            loose = []
            if which is None or which == home:
                lists[home].move_to_end(number)
                self._last += len(lists)
                batch.used = self._last
            else:
                del lists[home][number]
                self.sizes[home] -= len(some)
                self.add(which, some)
        self._move(loose, which)

    def take(self, slots: Sequence[int]) -> None:
        """Take these out of their lists, as far as they are in any."""
        if len(set(slots)) < len(slots):
            slots = list(dict.fromkeys(slots))
        lists, batch_of = self._lists, self.batch_of
        # Most are taken with all of their batch, or many of it.
        counted = Counter(map(batch_of.__getitem__, slots))
        fill(batch_of, slots, 0)
        for number, count in counted.items():
            if number:
                which = number % len(lists)
                self.sizes[which] -= count
                batch = lists[which][number]
                batch.left -= count
                if not batch.left:
                    del lists[which][number]
                elif 2 * batch.left < len(batch.slots):
                    self._shrink(number, batch)

    def take_oldest(self, which: int, count: int) -> list[int]:
        """Take the least recent slots of a list, ``count`` of them or all."""
        taken: list[int] = []
        batches, batch_of = self._lists[which], self.batch_of
        while batches and (missing := count - len(taken)) > 0:
            number = next(iter(batches))
            batch = batches[number]
            slots, begin = batch.slots, batch.begin
            if batch.left == len(slots) - begin:
                chosen = slots[begin : begin + missing]
                batch.begin += len(chosen)
            else:  # each slot that has left is passed once, however large the batch is
                here = (at for at in range(begin, len(slots)) if batch_of[slots[at]] == number)
                places = list(islice(here, missing))
                chosen = [slots[at] for at in places]
                batch.begin = places[-1] + 1
            batch.left -= len(chosen)
            if not batch.left:
                del batches[number]
            taken += chosen
        fill(batch_of, taken, 0)
        self.sizes[which] -= len(taken)
        return taken

    def take_oldest_of_all(self, count: int) -> list[int]:
        """Take the least recent slots, ``count`` of them or all, whichever list they are in."""
        filled = [which for which, its in enumerate(self._lists) if its]
        if len(filled) == 1:
            return self.take_oldest(filled[0], count)
        taken: list[int] = []
        while (missing := count - len(taken)) > 0 and any(self._lists):
            some = [
                (which, next(iter(its.values()))) for which, its in enumerate(self._lists) if its
            ]
            which, batch = min(some, key=lambda one: one[1].used)
            taken += self.take_oldest(which, min(missing, batch.left) if some[1:] else missing)
        return taken

    def _move(self, slots: list[int], which: int | None) -> None:
        """Take these, which are in a list each, and add them behind all others."""
        if not slots:
            return
        batch_of, lists = self.batch_of, range(len(self._lists))
        if which is not None:
            self.take(slots)
            self.add(which, slots)
            return
        homes = [batch_of[slot] % len(lists) for slot in slots]
        self.take(slots)
        for home in lists:
            self.add(home, [slot for slot, its in zip(slots, homes) if its == home])

    def _shrink(self, number: int, batch: _Batch) -> None:
        """Forget what has left a batch: at most as much work as was done to take it out."""
        batch_of = self.batch_of
        batch.slots = [s for s in batch.slots[batch.begin :] if batch_of[s] == number]
        batch.begin = 0


def fill(values: list[int], slots: Sequence[int], value: int) -> None:
    """Set the values of these slots.

    One by one: to find out whether they are neighbours, and could be set as a slice, takes longer.
    """
    for slot in slots:
        values[slot] = value
