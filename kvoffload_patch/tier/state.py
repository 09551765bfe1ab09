"""What one tier keeps, which policy orders it, and what can be asked of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, count
from operator import ne
from typing import Any

from kvoffload_patch.links import CPU, LOAD, STORE, Link
from kvoffload_patch.plan import Transfer, TransferResult
from kvoffload_patch.tier.entries import HeldSlots, Keys, LinkTickets, Slots
from kvoffload_patch.tier.exclusive import Exclusive
from kvoffload_patch.tier.gain import ExclusiveGain
from kvoffload_patch.tier.policies.adaptive import AdaptivePolicy
from kvoffload_patch.tier.policies.batches import BatchLists
from kvoffload_patch.tier.policy import EvictionPolicy, PolicyBroken
from kvoffload_patch.tier.prefixes import PrefixOrder
from kvoffload_patch.tier.queues import Ended, StoreQueue, WaitingBlocks, tell_ended
from kvoffload_patch.tier.slots import SlotPool
from kvoffload_patch.tier.stats import TierStats
from kvoffload_patch.tier.tuning import GIVEN_BACK_BLOCKS, NEIGHBOUR_BLOCKS
from kvoffload_patch.tier.uses import UseCounts

NO_KEY = object()  # in the place of the key of a slot that has none


class TierState:
    """The state of an `OffloadManager`, which changes it.

    Args:
        num_slots: slots usable at first; more become usable by `apply`.
        policy: makes the eviction policy of the key of each slot, and another after each `clear`.
        growing: more slots are to come.
        store: when blocks are stored: `eager`, as they are computed; `lazy`, when the GPU is about
            to lose them; `auto`, as they are computed while slots are free, then `lazy`.
        min_uses: how often a block must have been computed, or hit on the GPU, to be stored.
        gpu_blocks: of the GPU's prefix cache. `auto` weighs what they add to the tier, and is as
            `eager` unless it pays to be lazy; 0: that is not weighed.
    """

    def __init__(
        self,
        num_slots: int,
        policy: Callable[[Sequence[Hashable]], EvictionPolicy],
        growing: bool = False,
        store: str = "eager",
        min_uses: int = 1,
        gpu_blocks: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self.stats = TierStats()
        # Told of keys that have just left, some of which were never readable.
        self.on_left: Callable[[Iterable[Hashable]], None] | None = None
        self._new_policy, self._store_policy = policy, store
        self._stores_ahead = store == "auto"
        weighed = self._stores_ahead and gpu_blocks > 0
        self._gain = ExclusiveGain(num_slots, gpu_blocks) if weighed else None
        self._slots = SlotPool(num_slots)
        self._growing, self._sizing = growing, 0
        self._slot_of: dict[Hashable, int] = {}
        self._key_of: list[Hashable] = [NO_KEY] * num_slots  # the inverse, or NO_KEY, for each slot
        self._store_to = [0] * num_slots  # ticket of the last store to each slot
        self._held = HeldSlots()
        self._uses = UseCounts(min_uses) if min_uses > 1 else None
        self._queue, self._waiting = StoreQueue(), WaitingBlocks()
        self._loads, self._stores = LinkTickets(LOAD), LinkTickets(STORE)
        self._links = {LOAD: self._loads, STORE: self._stores}
        self._store_of: dict[int, int] = {}  # GPU block id -> ticket of its last store
        self._new_loads: list[Transfer] = []
        self._promised: list[tuple[Link, int]] = []
        self._ended = deque[Ended]()  # until what was stored and loaded for them is in place
        self._exclusive: Exclusive | None = None
        self._policy: EvictionPolicy
        self._begin_policy()

    @property
    def lazy(self) -> bool:
        """Whether the GPU may hold what is stored only when it is about to lose that."""
        return self._exclusive is not None

    @property
    def looks_ahead(self) -> bool:
        """Whether `leaving` is to be told now what the GPU will hand out next."""
        return self._exclusive is not None or (self._growing and bool(self._queue))

    @property
    def num_used(self) -> int:
        """Slots in use, those being written included."""
        return self.num_slots - self._slots.num_free

    @property
    def busy(self) -> bool:
        """Whether any planned transfer is not known to be done."""
        return any(link.under_way for link in self._links.values())

    @property
    def growing(self) -> bool:
        """Whether more slots are to come."""
        return self._growing

    @property
    def loads_to_plan(self) -> Sequence[Transfer]:
        """Loads that were begun since the last plan was made."""
        return self._new_loads

    def last_done(self, link: Link) -> int:
        """The last ticket of a link known to be done."""
        return self._links[link].done

    def num_under_way(self, link: Link) -> int:
        """Transfers of a link not known to be done."""
        return len(self._links[link].under_way)

    # Looking up

    def lookup(self, key: Hashable) -> str | None:
        """The place from which the block of ``key`` can be loaded now; None if there is none."""
        slot = self._slot_of.get(key)
        return CPU if slot is not None and self._store_to[slot] <= self._stores.done else None

    def reader(self) -> Callable[[Hashable], object]:
        """What `lookup` would say of any key is not None; until a plan is made."""
        return self.lookup if self._stores.under_way else self._slot_of.get

    def num_readable(self, keys: Keys) -> int:
        """How many of these keys, from the first on, `lookup` finds."""
        slots: list[Any] = list(map(self._slot_of.get, keys))
        if None in slots:
            del slots[slots.index(None) :]
        if self._stores.under_way:
            late = map(self._stores.done.__lt__, map(self._store_to.__getitem__, slots))
            return next(compress(count(), late), len(slots))
        return len(slots)

    def holds(self, key: Hashable) -> bool:
        """Whether ``key`` has a slot, readable or still being written."""
        return key in self._slot_of

    def load_done(self, ticket: int) -> bool:
        """Whether this load is known to be done; `load_failed` says how it ended."""
        return ticket <= self._loads.done

    def load_failed(self, ticket: int) -> bool:
        """Whether this load failed; to be asked before the plan that follows its end is made."""
        return ticket in self._loads.failed

    def drained(self) -> TransferResult:
        """The result that ranks give once they have finished all that was planned."""
        return TransferResult(tuple([(link.link, link.last) for link in self._links.values()]))

    # Inside

    def _begin_policy(self) -> None:
        """A new eviction policy, which knows of nothing."""
        held, policy = self._held, self._make_policy()
        self._prefixes = PrefixOrder(policy, self._key_of, self._is_idle, held.reads_of)
        # For whichever `Exclusive` there is: a step that makes one is not to walk the slots.
        self._copies = BatchLists(1, 0 if self._store_policy == "eager" else self.num_slots)
        self._exclusive, self._policy = None, self._prefixes
        self._follow_gain()

    def _make_policy(self) -> EvictionPolicy:
        policy = self._new_policy(self._key_of)
        if self._gain is not None and isinstance(policy, AdaptivePolicy):
            policy.sample = self._gain.sample
        return policy

    def _follow_gain(self, before: Exclusive | None = None) -> None:
        """Hold other blocks than the GPU if that is wanted, or pays.

        O(blocks under way) to begin or to end it. It gives its copies back first, some in each
        step, and goes on if it pays again meanwhile.

        ``before``: what did so until now, and knows what the GPU has; O(slots in use) to go on.
        """
        lazy, order = self._store_policy != "eager", self._exclusive
        if self._gain is not None:
            lazy = self._gain.pays
        if order is not None:
            order.ending = not lazy
            if order.ending and not order.end_in_part(GIVEN_BACK_BLOCKS):
                self._be_inclusive()
        elif lazy:
            self._be_exclusive(before)

    def _be_exclusive(self, before: Exclusive | None) -> None:
        """What the GPU holds as well leaves first from now on, as far as it is told of it."""
        self._ended.clear()
        self._prefixes.remove(self._held.pinned())
        under_way = self._slots_under_way()
        self._exclusive = self._policy = Exclusive(
            self._prefixes, self._key_of, self._slot_of, self._copies, under_way
        )
        if before is not None:
            self._exclusive.go_on(before)

    def _be_inclusive(self) -> None:
        """The tier may hold what the GPU holds: the policy alone says what leaves."""
        if self._exclusive is not None:
            self._exclusive.end()
            pinned = self._held.pinned()
            self._prefixes.insert(pinned)
            self._prefixes.pin(pinned)
        self._exclusive, self._policy = None, self._prefixes

    def _tell_ended(self) -> None:
        """Tell of prefixes whose copies are done."""
        done = self._stores.done
        if done == self._stores.last and not self._waiting:
            done += 1  # what waited for the next plan is not stored any more
        tell_ended(self._ended, done, self._loads.done, self._find_pieces, self._prefixes)

    def _find(self, keys: Keys) -> Sequence[Any]:
        """The slot of each key; None where it has none. A range, if all are in neighbours."""
        pieces = self._find_pieces(keys)
        return pieces[0] if len(pieces) == 1 else list(chain.from_iterable(pieces))

    def _find_pieces(self, keys: Keys) -> list[Sequence[Any]]:
        """As `_find`: a range for each piece whose keys are in neighbours, and a list of the rest.

        Keys that follow each other mostly are: one look at a dict finds them all.
        """
        pieces: list[Sequence[Any]] = []
        keys, done = list(keys), 0
        while done < len(keys):
            slot: Any = self._slot_of.get(keys[done])
            same = 0 if slot is None else self._same(keys, done, slot)
            if same < NEIGHBOUR_BLOCKS:
                pieces.append(list(map(self._slot_of.get, keys[done:])))
                break
            pieces.append(range(slot, slot + same))
            done += same
        return pieces

    def _same(self, keys: list[Hashable], begin: int, slot: int) -> int:
        """How many keys from one on are in neighbouring slots from this one on.

        They are compared in parts that grow, so that a short piece costs no look at all the rest.
        """
        same, part = 0, NEIGHBOUR_BLOCKS
        while asked := keys[begin + same : begin + same + part]:
            held = self._key_of[slot + same : slot + same + len(asked)]
            if held != asked:
                return same + next(compress(count(), map(ne, held, asked)), len(held))
            same, part = same + len(asked), 4 * part
        return same

    def _take_slots(self, count: int) -> tuple[int, ...]:
        """Slots to be written, so many or as many as there can be, after evicting for them."""
        slots = self._find_room(count)
        if self._exclusive is not None:
            self._exclusive.written(slots)
        return slots

    def _find_room(self, count: int) -> tuple[int, ...]:
        free = self._slots.num_free
        if count <= free:
            return tuple(self._slots.allocate(count))
        # What was stored together is mostly evicted together: sorted, these are neighbours again.
        slots = sorted(self._policy.evict(count - free))
        if slots and slots[0] < 0:  # it would stand for one from the end of each list
            raise PolicyBroken(self._prefixes.policy, f"slot {slots[0]}, which holds none")
        self.stats.evicted += len(slots)
        slot_of, key_of = self._slot_of, self._key_of
        if self.on_left is not None:
            self.on_left(list(map(key_of.__getitem__, slots)))
        try:
            for slot in slots:
                del slot_of[key_of[slot]]
        except KeyError:
            raise PolicyBroken(self._prefixes.policy, f"slot {slot}, which holds none") from None
        return (*slots, *self._slots.allocate(free)) if free else tuple(slots)

    def _let_go(self, keys: Keys, slots: Slots) -> tuple[Keys, Slots]:
        """Nothing uses these slots any more: free those whose keys were forgotten meanwhile.

        Returns:
            The other keys, and their slots.
        """
        forgotten = self._held.take_forgotten(slots) if self._held.forgotten else None
        if not forgotten:
            return keys, slots
        self._slots.free(slot for slot in forgotten if slot < self.num_slots)
        kept = [(key, slot) for key, slot in zip(keys, slots) if slot not in forgotten]
        return [key for key, _ in kept], [slot for _, slot in kept]

    def _is_idle(self, slot: int) -> bool:
        """Whether no transfer under way uses a slot that holds a block."""
        return self._store_to[slot] <= self._stores.done and not self._held.is_read(slot)

    def _slots_under_way(self) -> Iterator[int]:
        """Slots that transfers under way use, some of them several times."""
        transfers = chain.from_iterable(link.under_way for link in self._links.values())
        return chain.from_iterable(slots for _, _, slots in transfers)

    def _forget_behind(self, num_slots: int) -> None:
        """Forget what is in slots from this number on, all at once: a step waits for it.

        The policy still has them, until it is asked for the order of what is left.
        """
        beyond = {key: slot for key, slot in self._slot_of.items() if slot >= num_slots}
        self.stats.removed["resized"] += len(beyond)
        if self.on_left is not None:
            self.on_left(beyond)  # in one event
        for key in beyond:
            del self._slot_of[key]
        self._held.forget(slot for slot in self._slots_under_way() if slot >= num_slots)
        self._slots.shrink(num_slots)

    def _count_slots(self, num_slots: int) -> None:
        """There are so many slots from now on."""
        self.num_slots = num_slots
        del self._key_of[num_slots:], self._store_to[num_slots:]
        self._key_of += [NO_KEY] * (num_slots - len(self._key_of))
        self._store_to += [0] * (num_slots - len(self._store_to))
        if self._store_policy != "eager":
            self._copies.grow(num_slots)
        if self._gain is not None:
            self._gain.resize(num_slots)

    def _often_used(self, blocks: Mapping[Hashable, int]) -> Mapping[Hashable, int]:
        """Those of these, which could be stored now, that were used often enough for it."""
        if self._uses is None or not blocks:
            return blocks
        enough = self._uses.enough(blocks)
        self.stats.few_uses += len(blocks) - len(enough)
        return enough
