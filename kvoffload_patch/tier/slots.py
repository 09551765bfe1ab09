"""The pool of CPU slots: free slots as runs of neighbours.

Runs matter because a transfer of neighbouring slots is one copy over the bus, and one copy per
slot is not. Every operation costs O(1) for each slot it takes or returns, whatever the capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class SlotPool:
    """Hands out CPU slots ``0 .. capacity - 1``, in runs of neighbours where it can.

    A free run is known by both its ends, so that slots that come back are joined with their
    neighbours without a search. Runs are binned by the bit length of their size; an allocation
    takes from the largest bin, which keeps what it gets in one piece as long as possible.

    Args:
        capacity: number of slots.
        reserved: slots that start out taken; they come back through `free`.
    """

    def __init__(self, capacity: int, reserved: Iterable[int] = ()) -> None:
        if capacity < 0:
            raise ValueError(f"capacity must not be negative, got {capacity}")
        self.capacity = capacity
        self.num_free = 0
        self._taken = bytearray(capacity)
        self._size_at_start: dict[int, int] = {}
        self._start_at_end: dict[int, int] = {}
        # A run of up to `capacity` slots has a bit length of 1 to capacity.bit_length().
        self._bins: list[dict[int, None]] = [{} for _ in range(capacity.bit_length() + 1)]
        begin = 0
        for slot in sorted(reserved):
            self._taken[slot] = 1
            self._add_run(begin, slot - begin)
            begin = slot + 1
        self._add_run(begin, capacity - begin)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` slots, neighbours where possible, in ascending order within a run.

        Raises:
            ValueError: fewer than ``count`` slots are free; none is taken then.
        """
        if count > self.num_free:
            raise ValueError(f"{count} slots asked for, {self.num_free} are free")
        slots: list[int] = []
        self.num_free -= count
        while (missing := count - len(slots)) > 0:
            candidates = next(filter(None, reversed(self._bins)))
            # Not the first: finding that means passing all that has left the dict's front.
            start, _ = candidates.popitem()
            size = self._size_at_start.pop(start)
            end = start + size
            if size > missing:
                size, left = missing, size - missing
                self._size_at_start[start + size] = left
                self._start_at_end[end] = start + size
                self._bins[left.bit_length()][start + size] = None
            else:
                del self._start_at_end[end]
            slots += range(start, start + size)
            self._taken[start : start + size] = b"\x01" * size
        return slots

    def free(self, slots: Iterable[int]) -> None:
        """Return slots, and join them with the free runs beside them.

        Raises:
            ValueError: a slot is not taken, or is there twice; none is returned then.
        """
        runs = _runs(sorted(slots))
        for start, end in runs:
            if start < 0 or self._taken.count(1, start, end) < end - start:
                raise ValueError(f"slots {start} to {end - 1} are not all taken")
        for start, end in runs:
            self._taken[start:end] = bytes(end - start)
            if start in self._start_at_end:
                before = self._start_at_end[start]
                self._remove_run(before, start - before)
                start = before
            if end in self._size_at_start:
                size = self._size_at_start[end]
                self._remove_run(end, size)
                end += size
            self._add_run(start, end - start)

    def shrink(self, capacity: int) -> None:
        """There are no slots from this number on any more, taken or free; O(free runs)."""
        for start, size in list(self._size_at_start.items()):
            if start + size > capacity:
                self._remove_run(start, size)
                self._add_run(start, capacity - start)
        self.capacity = capacity
        del self._taken[capacity:]

    def grow(self, capacity: int, reserved: Iterable[int] = ()) -> None:
        """Add free slots behind the last one, as one run with those that are free before them.

        Args:
            capacity: slots from now on.
            reserved: those of the new ones that start out taken; others than new ones are ignored.

        Raises:
            ValueError: there are more slots than that already.
        """
        begin = end = self.capacity
        if capacity < end:
            raise ValueError(f"expected at least {end} slots, got {capacity}")
        self.capacity = capacity
        self._taken.extend(bytes(capacity - end))
        self._bins.extend({} for _ in range(capacity.bit_length() + 1 - len(self._bins)))
        if begin in self._start_at_end:
            begin = self._start_at_end[begin]
            self._remove_run(begin, end - begin)
        for slot in sorted(reserved):
            if end <= slot < capacity:
                self._taken[slot] = 1
                self._add_run(begin, slot - begin)
                begin = slot + 1
        self._add_run(begin, capacity - begin)

    def _add_run(self, start: int, size: int) -> None:
        if size <= 0:
            return
        self._size_at_start[start] = size
        self._start_at_end[start + size] = start
        self._bins[size.bit_length()][start] = None
        self.num_free += size

    def _remove_run(self, start: int, size: int) -> None:
        del self._size_at_start[start]
        del self._start_at_end[start + size]
        del self._bins[size.bit_length()][start]
        self.num_free -= size


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending slots as runs of neighbours: first, and behind the last.

    Raises:
        ValueError: a slot is there twice.
    """
    if not slots:
        return []
    runs, start, end = list[tuple[int, int]](), slots[0], slots[0]
    for slot in slots:
        if slot != end:
            if slot < end:
                raise ValueError(f"slot {slot} is there twice")
            runs.append((start, end))
            start = slot
        end = slot + 1
    runs.append((start, end))
    return runs
