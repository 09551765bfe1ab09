"""What the GPU holds as well leaves the tier first, and is stored again before the GPU loses it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from itertools import compress, repeat
from typing import Any

from kvoffload_patch.tier.policies.batches import BatchLists
from kvoffload_patch.tier.policy import EvictionPolicy
from kvoffload_patch.tier.tuning import (
    AHEAD_PARTS,
    AHEAD_TIMES,
    HELD_BACK_BLOCKS,
    HELD_BACK_TIMES,
)


def blocks_ahead(gpu_blocks: int, step_blocks: int) -> int:
    """How many of the GPU's free blocks the tier looks at before they are handed out.

    Two steps' worth, so that a store has a step's time before its block is overwritten, and an
    eighth of the GPU for loads, which take more at once. Chosen by replays (docs/policies.md).

    Args:
        gpu_blocks: of the GPU's prefix cache.
        step_blocks: that a step fills at most.
    """
    return max(AHEAD_TIMES * step_blocks, gpu_blocks // AHEAD_PARTS)


class Exclusive:
    """An eviction policy that gives up copies of what the GPU holds; another orders the rest.

    The other one is told of slots whose block the GPU has lost or is about to lose: each is new to
    it then, and used again if a request has hit or loaded the block meanwhile. It is not told of
    pins, because what is loaded is on the GPU. A slot that is pinned, free or being written is
    neither a copy nor the other one's.

    It is made for a tier that is in use, within a step. So it notes the slots that are not the
    other one's, which are few then, and walks no others.

    What the GPU holds is known as far as the tier is told of it. Told too little or too much,
    it evicts other blocks; which bytes are read never depends on it.

    A batch is asked as a whole first, by operations on sets and dicts: mostly all of it is the
    same. This is done for each block that is loaded, on the engine's thread.

    Args:
        others: orders what the GPU has lost.
        key_of: of each slot, kept up to date.
        slot_of: of each key that has one, kept up to date.
        copies: one list, empty; it grows with the keys, and is there for the next one, because it
            costs O(slots) to make.
        under_way: slots that are pinned or being written; the other policy orders all others that
            are in use.

    Attributes:
        ending: it gives its copies back, some in each step, and is then no more.
    """

    def __init__(
        self,
        others: EvictionPolicy,
        key_of: Sequence[Hashable],
        slot_of: Mapping[Hashable, int],
        copies: BatchLists,
        under_way: Iterable[int] = (),
    ) -> None:
        self.ending = False
        self._others = others
        self._key_of = key_of
        self._slot_of = slot_of
        self._copies = copies
        # Slots in use that neither orders. Free ones may be in here, too: nobody asks for them.
        self._apart = set(under_way)
        self._on_gpu: set[Hashable] = set()
        self._key_in: dict[int, Hashable] = {}  # of GPU blocks
        self._again: set[Hashable] = set()  # keys that were used again on the GPU
        self._owed = 0  # blocks to be handed out until it tries again

    def go_on(self, before: Exclusive) -> None:
        """Know of the GPU what this one knew, which has ended. O(slots in use)."""
        self._on_gpu, self._key_in = before._on_gpu, before._key_in
        self._again, self._owed = before._again, before._owed
        if not self.stores_at_once:
            found = self._on_gpu
            self.hit([slot for key, slot in self._slot_of.items() if key in found])

    def end(self) -> None:
        """The other policy orders all of them from now on. O(copies)."""
        self._others.insert(self._copies.take_oldest(0, self._copies.sizes[0]))

    def end_in_part(self, count: int) -> bool:
        """Give so many copies back, and know less of the GPU; returns whether anything is left.

        While it is `ending` little is added to any of that, so a number of these calls leave
        nothing. To let go of all that is known at once takes milliseconds, too.
        """
        self._others.insert(self._copies.take_oldest(0, count))
        known: tuple[Any, ...] = self._key_in, self._on_gpu, self._again
        for held, take in zip(known, (self._key_in.popitem, self._on_gpu.pop, self._again.pop)):
            for _ in range(min(count, len(held))):
                take()
        return self._copies.sizes[0] > 0 or any(known)

    # What the GPU holds

    @property
    def stores_at_once(self) -> bool:
        """Whether nothing becomes a copy now, and what is computed is stored at once.

        As this is ending, or as the GPU lately lost blocks before they could be stored: where
        requests use nearly all of it, and others are given at once what one gives back.
        """
        return self.ending or self._owed > 0

    def handed_out(self, gpu_block_ids: Sequence[int], dropped: Sequence[int]) -> int:
        """These blocks are overwritten, and ``dropped`` of them were still to be stored.

        Returns:
            How many are lost, with those that had not come to be stored yet.
        """
        self._leave(dropped)  # or they would count twice
        lost = len(dropped) + self._leave(gpu_block_ids)
        self._owed = max(0, self._owed - len(gpu_block_ids)) + HELD_BACK_BLOCKS * lost
        self._owed = min(self._owed, HELD_BACK_TIMES * len(self._key_of))
        return lost

    def filled(self, keys: Sequence[Hashable], gpu_block_ids: Sequence[int]) -> None:
        """These GPU blocks hold these keys, or will after this step."""
        if self.stores_at_once:
            self._on_gpu.difference_update(keys)
            return
        if not self._key_in.keys().isdisjoint(gpu_block_ids):
            self._on_gpu.difference_update(map(self._key_in.get, gpu_block_ids))
        self._on_gpu.update(keys)
        self._key_in.update(zip(gpu_block_ids, keys))

    def loaded(self, keys: Sequence[Hashable], gpu_block_ids: Sequence[int]) -> None:
        """A request loads these keys into these GPU blocks."""
        self.filled(keys, gpu_block_ids)
        self.used(keys)

    def used(self, keys: Iterable[Hashable]) -> None:
        """These are used again, and the GPU holds them."""
        if self.ending:
            return
        if len(self._again) > len(self._key_in) + len(self._key_of):
            self._again.clear()  # of blocks that were never stored
        self._again.update(keys)

    def ended(self, keys: Sequence[Hashable]) -> None:
        """A request that used and computed these has ended.

        What a conversation adds will be used with what it began with, or not at all.
        """
        if 3 * len(self._again.intersection(keys)) >= len(keys):
            self.used(self._on_gpu.intersection(keys))

    def hit_on_gpu(
        self,
        gpu_block_ids: Sequence[int],
        keys: Sequence[Hashable],
        cached: Callable[[int, Hashable], bool],
    ) -> None:
        """A request hits blocks with keys, given head first, where they are cached still."""
        if list(map(self._key_in.get, gpu_block_ids)) != keys:
            held = [(key, block) for block, key in zip(gpu_block_ids, keys) if cached(block, key)]
            keys, gpu_block_ids = [key for key, _ in held], [block for _, block in held]
        self.filled(keys, gpu_block_ids)
        self.used(keys)
        found = filter(self._slot_of.__contains__, reversed(keys))
        self.hit(list(map(self._slot_of.__getitem__, found)))

    def leaving(
        self, gpu_block_ids: Sequence[int], keys: Sequence[Hashable]
    ) -> Sequence[int | None]:
        """The GPU is about to lose these blocks, which hold these keys, in this order.

        Returns:
            The slot of each key; None where it has none.
        """
        self._forget(gpu_block_ids)
        self._on_gpu.difference_update(keys)
        slots = list(map(self._slot_of.get, keys))
        self._no_copies(slots)
        return slots

    def _leave(self, gpu_block_ids: Sequence[int]) -> int:
        """The GPU has lost these blocks; returns how many of them held what has no slot."""
        if self._key_in.keys().isdisjoint(gpu_block_ids):
            return 0
        keys = self._forget(gpu_block_ids)
        before = len(self._on_gpu)
        self._on_gpu.difference_update(keys)
        slots = list(map(self._slot_of.get, keys))
        self._no_copies(slots)
        return min(slots.count(None), before - len(self._on_gpu))

    def _forget(self, gpu_block_ids: Sequence[int]) -> list[Hashable]:
        """What is known of these blocks is over; returns what they held."""
        held = map(self._key_in.pop, gpu_block_ids, repeat(None))
        return [key for key in held if key is not None]

    def _no_copies(self, slots: Sequence[int | None]) -> None:
        """Those of these that are copies are the other policy's from now on."""
        batch_of = self._copies.batch_of
        alone = [slot for slot in slots if slot is not None and batch_of[slot]]
        if len(set(alone)) < len(alone):
            alone = list(dict.fromkeys(alone))  # two blocks hold the same
        self._copies.take(alone)
        self._give(alone)

    def written(self, slots: Iterable[int]) -> None:
        """These are being written from now on; they were free, or `evict` chose them."""
        self._apart.update(slots)

    # As an eviction policy

    def grow(self) -> None:
        self._others.grow()

    def miss(self, keys: Collection[Hashable]) -> None:
        self._others.miss(keys)

    def insert(self, slots: Sequence[int]) -> None:
        on_gpu, key_of = self._on_gpu, self._key_of
        self._apart.difference_update(slots)
        keys = list(map(key_of.__getitem__, slots))
        if on_gpu.issuperset(keys):
            self._copies.add(0, slots)
            return
        self._copies.add(0, [slot for slot in slots if key_of[slot] in on_gpu])
        self._give([slot for slot in slots if key_of[slot] not in on_gpu])

    def hit(self, slots: Sequence[int]) -> None:
        apart, batch_of = self._apart, self._copies.batch_of
        if not self.stores_at_once and all(map(batch_of.__getitem__, slots)):
            self._copies.make_recent(slots)
            return
        # Where one is there twice, the last counts.
        once = [slot for slot in dict.fromkeys(reversed(slots)) if slot not in apart][::-1]
        copies = [slot for slot in once if batch_of[slot]]
        theirs = [slot for slot in once if not batch_of[slot]]
        if self.stores_at_once:
            self._others.hit(theirs)
            self._copies.take(copies)
            self._give(copies)
            return
        self._others.remove(theirs)
        self._copies.take(copies)
        self._copies.add(0, once)

    def regroup(self, slots: Sequence[int]) -> None:
        """The order in which the GPU loses blocks has grouped them."""

    def pin(self, slots: Sequence[int]) -> None:
        self._leave_orders(slots, loaded=True)
        self._apart.update(slots)

    def unpin(self, slots: Sequence[int]) -> None:
        self.insert(slots)

    def remove(self, slots: Sequence[int]) -> None:
        self._leave_orders(slots, loaded=False)

    def _leave_orders(self, slots: Sequence[int], loaded: bool) -> None:
        apart, batch_of = self._apart, self._copies.batch_of
        theirs = slots
        if any(map(batch_of.__getitem__, slots)) or not apart.isdisjoint(slots):
            theirs = [slot for slot in slots if not batch_of[slot] and slot not in apart]
        if theirs:
            if loaded:
                self._others.pin(theirs)
            self._others.remove(theirs)
        if len(theirs) < len(slots):
            self._copies.take(slots)

    def evict(self, count: int) -> Sequence[int]:
        chosen = self._copies.take_oldest(0, count)
        if len(chosen) < count:
            chosen += self._others.evict(count - len(chosen))
        return chosen

    def _give(self, slots: Sequence[int]) -> None:
        """The other policy orders these from now on."""
        if not slots:
            return
        self._others.insert(slots)
        again = self._again
        keys = list(map(self._key_of.__getitem__, slots))
        if not again.isdisjoint(keys):
            self._others.hit(list(compress(slots, map(again.__contains__, keys))))
            again.difference_update(keys)
