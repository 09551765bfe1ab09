"""The state of the tier: keys, slots, pins and tickets. See the package for the protocol."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import islice, repeat
from types import MappingProxyType
from typing import Any

from kvoffload_patch.links import CPU, GPU, LOAD
from kvoffload_patch.plan import Transfer, TransferPlan, TransferResult
from kvoffload_patch.tier.entries import Blocks, Keys, LinkTickets, Slots, Storable, take_tickets
from kvoffload_patch.tier.policy import EvictionPolicy
from kvoffload_patch.tier.queues import IN_A_ROW, Ended, Rests
from kvoffload_patch.tier.slots import SlotPool
from kvoffload_patch.tier.state import NO_KEY, TierState
from kvoffload_patch.tier.stats import RemovedBy


class OffloadManager(TierState):
    """Owns the CPU slots of one scheduler; every rank holds the bytes of the same slots.

    A step costs O(1) for each block named or under way, and ends being lazy over several.
    """

    # Looking up

    def touch(self, keys: Keys) -> Sequence[Any]:
        """Refresh the recency of a prefix, given head first; the head ends most recent.

        A block is worth nothing without those before it, so a prefix is evicted from its tail.
        Returns the slot of each; None where it has none.
        """
        slots = self._find(keys)
        known = slots if isinstance(slots, range) else [s for s in slots if s is not None]
        self._policy.hit(known[::-1])
        return slots

    def request_ended(self, keys: Keys, together: bool = True, rests: Rests = IN_A_ROW) -> None:
        """A request has ended; what it means is done once its copies are.

        Args:
            keys: that it used and stored, head first.
            together: whether in several steps; then they are put together.
            rests: each is worth nothing without the one before it, or, of the keys in here, without
                that one, so that a tail is evicted before its head from now on, and first of all
                where its head is missing; None: that is not known.
        """
        if self._exclusive is None:
            # Some of what it stored may wait for the next plan.
            last = self._stores.last + bool(self._waiting), self._loads.last
            self._ended.append(Ended(keys, together, rests, *last))
            self._tell_ended()
        elif together:
            self._exclusive.ended(keys)

    def hit_on_gpu(
        self,
        gpu_block_ids: Sequence[int],
        keys: Keys,
        cached: Callable[[int, Hashable], bool],
    ) -> None:
        """A request hits these GPU blocks with these keys, head first, if they are still cached."""
        if self._uses is not None:
            self._uses.count(keys, self.num_slots)
        if self._gain is not None:
            self._gain.hit_on_gpu(keys)
        if self._exclusive is not None:
            self._exclusive.hit_on_gpu(gpu_block_ids, keys, cached)
            if not self._exclusive.stores_at_once:
                return
        slots = self.touch(keys) if self._exclusive is None else self._find(keys)
        if isinstance(slots, range):
            return
        missing = {k: block for k, block, at in zip(keys, gpu_block_ids, slots) if at is None}
        enough = self._often_used(missing)
        for gpu_block_id, key in zip(gpu_block_ids, keys):
            # What has left the GPU cache meanwhile may have made room for another's store.
            if key in enough and cached(gpu_block_id, key):
                self.queue_store(key, gpu_block_id)

    # Storing

    def queue_store(self, key: Hashable, gpu_block_id: int) -> None:
        """``gpu_block_id`` holds, or will hold after this step, the block of ``key``."""
        if key not in self._slot_of:
            self._queue.add(key, gpu_block_id)

    def offer(self, computed: Blocks, others: int = 0) -> Blocks:
        """GPU blocks by the keys that are computed in them: which to store at once.

        Args:
            computed: as `make_plan` has it.
            others: blocks besides those queued that need a slot first.
        """
        missed = computed
        if not self._slot_of.keys().isdisjoint(computed):
            missed = {k: block for k, block in computed.items() if k not in self._slot_of}
            self.stats.held += len(computed) - len(missed)
        if self._uses is not None:
            self._uses.count(missed, self.num_slots)
        if self._gain is not None:
            self._gain.computed(missed)
        if self._exclusive is not None and computed:
            self._exclusive.filled(tuple(computed), tuple(computed.values()))
            self._policy.miss(missed)
            if not self._exclusive.stores_at_once:
                room = self._slots.num_free - len(self._queue) - others if self._stores_ahead else 0
                if self._uses is not None and room > 0:
                    missed = self._uses.enough(missed)
                return dict(islice(missed.items(), max(room, 0)))
        return missed if self._uses is None else self._often_used(missed)

    def about_to_lose(self, gpu_block_ids: Sequence[int], keys: Keys) -> int:
        """The GPU will hand these blocks out soon, in this order; they hold these keys.

        What the tier has of them is no mere copy any more. The rest is stored with the next plan,
        unless it is handed out before; returns how many blocks that is. Not to be told of
        blocks that are being filled. With `eager`, that is what waits for slots of a growing tier.
        """
        leaving = self.leaving(gpu_block_ids, keys)
        add = self._queue.add_first if self._growing else self._queue.add
        for key, gpu_block_id in leaving.items():
            add(key, gpu_block_id)
        return len(leaving)

    def leaving(self, gpu_block_ids: Sequence[int], keys: Keys) -> Blocks:
        """As `about_to_lose`, but nothing is queued.

        Returns:
            GPU blocks, by key, of what is to be given to `make_plan` before any is handed out.
        """
        if self._exclusive is None:
            if self._growing:
                self._queue.hurry(gpu_block_ids, keys)
            return {}
        slots = self._exclusive.leaving(gpu_block_ids, keys)
        # Where two blocks hold the same, the later one is there for longer.
        blocks = zip(keys, gpu_block_ids, slots)
        only_there = {key: gpu_block_id for key, gpu_block_id, slot in blocks if slot is None}
        # The first one was used least recently: it is the tail of what is stored.
        return self._often_used(dict(reversed(only_there.items())))

    def note_new_blocks(self, gpu_block_ids: Sequence[int]) -> None:
        """These GPU blocks were handed out to be overwritten.

        A store of theirs that is not planned is dropped; the last one that was planned is waited
        for by the next plan's forward pass, known to be done or not: another rank may be behind.
        """
        dropped = self._queue.drop(gpu_block_ids) + self._waiting.drop(gpu_block_ids)
        held, stores = self._exclusive, self._stores
        lost = len(dropped) if held is None else held.handed_out(gpu_block_ids, dropped)
        self.stats.overwritten += lost
        last = max(map(self._store_of.get, gpu_block_ids, repeat(0)), default=0)
        if last > stores.waited:  # else a forward pass has waited for it
            stores.wait_for(last)

    def drop_queued(self) -> int:
        """What was queued, or waits, and is not planned yet is not stored; how many blocks."""
        dropped = len(self._queue) + len(self._waiting)
        self._queue.clear()
        self._waiting.clear()
        return dropped

    def discard(self, key: Hashable, reason: RemovedBy = "invalid") -> None:
        """What the GPU holds, and may have stored, under ``key`` turned out to be wrong."""
        if (slot := self._slot_of.pop(key, None)) is None:
            return
        self.stats.removed[reason] += 1
        if self.on_left is not None:
            self.on_left((key,))
        written = self._store_to[slot] > self._stores.done
        if not written:
            self._policy.remove((slot,))
        else:
            self._prefixes.forget((slot,))
        self._key_of[slot] = NO_KEY
        if written or self._held.is_read(slot):
            self._held.forget((slot,))  # the transfer gives it back when it is done
        else:
            self._slots.free((slot,))

    # Loading

    def begin_load(self, keys: Keys, gpu_block_ids: Sequence[int], compared: bool = False) -> int:
        """Plan a load of readable keys into GPU blocks; returns its ticket.

        Args:
            compared: with the checksums that the blocks were stored with.

        Raises:
            KeyError: a key is not readable. Nothing has changed then.
        """
        slots, done = tuple(self._find(keys)), self._stores.done
        if None in slots or max(map(self._store_to.__getitem__, slots), default=0) > done:
            raise KeyError(next(key for key in keys if not self.lookup(key)))
        self._policy.pin(slots[::-1])
        if self._gain is not None:
            self._gain.loaded(keys)
        if self._exclusive is not None:
            self._exclusive.loaded(keys, gpu_block_ids)
        self._held.read(slots)
        ticket = self._loads.give_out(tuple(keys), slots)
        self._new_loads.append(Transfer(ticket, CPU, GPU, slots, tuple(gpu_block_ids), compared))
        return ticket

    def expose_load(self, ticket: int) -> None:
        """The next plan's forward pass may read what this load brings: it waits for it.

        From now on it must not fail: a rank on which it does raises.
        """
        self._loads.wait_for(ticket)
        self._promised.append((LOAD, ticket))

    def await_load(self, ticket: int) -> None:
        """The next plan's forward pass waits for this load, though it does not read it.

        Other blocks come to where it writes, and a rank that is behind may still write there.
        """
        self._loads.wait_for(ticket)

    # Steps

    def make_plan(
        self,
        storable: Storable,
        computed: Blocks = MappingProxyType({}),
        leaving: Blocks = MappingProxyType({}),
        can_wait: bool = False,
    ) -> TransferPlan | None:
        """Freeze this step's plan; None when there is nothing to move and to wait for.

        Args:
            storable: whether a GPU block still has, and will have computed after this step,
                the block of a key that was queued. What is not is forgotten.
            computed: GPU blocks by the keys that this step computes, stored behind those queued.
            leaving: what `leaving` said since the last block was handed out.
            can_wait: whether what is computed may be stored with that of some steps to come.
        """
        held = self._exclusive
        if self._gain is not None and (self._gain.pays == (held is None) or held and held.ending):
            self._follow_gain()
        hurries = leaving or self._queue or self._growing or self._exclusive  # from this step on
        store: tuple[Transfer, ...] = ()
        if not can_wait or hurries or not self._waiting.add(computed):
            if self._waiting:
                waited, lost = self._waiting.take(storable)
                self.stats.overwritten += lost
                computed = {**waited, **computed}
            if computed or leaving or self._queue:
                store = self._plan_store(storable, computed, leaving)
        failed = self._loads.failed or self._stores.failed  # ranks name it until told
        if not (store or self._loads.wait or self._stores.wait or self._new_loads or failed):
            return None
        waits, done = take_tickets(self._links.values())
        loads, promised = tuple(self._new_loads), tuple(self._promised)
        self._new_loads, self._promised = [], []
        for link in self._links.values() if failed else ():
            link.forget_failed()
        return TransferPlan(loads, store, waits, done, promised)

    def apply(self, result: TransferResult) -> list[Hashable]:
        """Take in what is done, and slots that are new; returns the keys that became readable.

        What a failed store has written is forgotten, and so is what a failed load has read: its
        slots may be the fault.
        """
        readable: list[Hashable] = []
        for name, ticket, reason in result.failed:
            self._links[name].note_failed(ticket, reason)
        self.stats.mismatches = max(self.stats.mismatches, result.mismatches)
        for name, done in result.done:
            link = self._links[name]
            for ticket, keys, slots in link.take_done(done) if done > link.done else ():
                if ticket in link.failed:
                    self._give_up(link, keys, slots, link.failed[ticket])
                elif link is self._loads:
                    self._finish_load(keys, slots)
                else:
                    readable += self._finish_store(keys, slots)
        if result.num_slots is not None and result.sizing == self._sizing:
            self._grow(result.num_slots, result.growing)
        if self._ended:
            self._tell_ended()
        return readable

    def clear(self, reason: RemovedBy = "reset") -> None:
        """Forget every key. Slots of transfers under way come back when those are done."""
        held = {slot for slot in self._slots_under_way() if slot < self.num_slots}
        self._held.forget(held)
        self.stats.removed[reason] += len(self._slot_of)
        if self.on_left is not None:
            self.on_left(self._slot_of)
        self._slot_of = {}
        self._key_of = [NO_KEY] * self.num_slots
        self.drop_queued()
        self._ended.clear()
        self._begin_policy()
        self._slots = SlotPool(self.num_slots, reserved=held)

    def change_policy(self, policy: Callable[[Sequence[Hashable]], EvictionPolicy]) -> None:
        """Evict by another policy, which is told what there is as stored once; O(slots in use)."""
        self._new_policy = policy
        self._reorder(self.num_slots)

    def resize(self, num_slots: int) -> int:
        """Use no more than so many slots; blocks behind them are forgotten. O(slots in use).

        Returns the number of this change: what ranks say of slots counts only with that.
        """
        self._sizing += 1
        if num_slots < self.num_slots:
            self._forget_behind(num_slots)
            self._reorder(num_slots)
        return self._sizing

    # Inside

    def _grow(self, num_slots: int, growing: bool) -> None:
        """So many slots are usable, and more are to come or not."""
        self._growing = growing
        if num_slots > self.num_slots:
            self._count_slots(num_slots)
            self._slots.grow(num_slots, self._held.forgotten)  # some are still under way
            self._policy.grow()

    def _reorder(self, num_slots: int) -> None:
        """A new policy for so many slots, and for what can be evicted now, in its order."""
        before = self._exclusive
        self._be_inclusive()
        in_order = self._prefixes.take_all()
        if num_slots < self.num_slots:
            in_order = [slot for slot in in_order if slot < num_slots]
            self._prefixes.shrink(num_slots)
        self._count_slots(num_slots)
        self._prefixes.policy = self._make_policy()
        pinned = self._held.pinned()
        self._prefixes.insert([*in_order, *pinned])
        self._prefixes.pin(pinned)
        self._follow_gain(before)

    def _plan_store(
        self, storable: Storable, computed: Blocks, leaving: Blocks
    ) -> tuple[Transfer, ...]:
        wanted, slot_of = self.offer(computed, len(leaving)), self._slot_of
        if leaving:
            wanted = {**leaving, **wanted}
        if self._queue or self._growing:
            wanted = self._through_queue(wanted, storable, leaving)
        if not wanted:
            return ()
        keys, gpu_block_ids = tuple(wanted), tuple(wanted.values())
        if self._exclusive is None:
            self._policy.miss(wanted)
        slots = self._take_slots(len(keys))
        if len(slots) < len(keys):
            self.stats.dropped += len(keys) - len(slots)
            if not slots:
                return ()
            keys, gpu_block_ids = keys[: len(slots)], gpu_block_ids[: len(slots)]
        ticket = self._stores.give_out(keys, slots)
        key_of, store_to, store_of = self._key_of, self._store_to, self._store_of
        for key, slot, gpu_block_id in zip(keys, slots, gpu_block_ids):
            slot_of[key], key_of[slot] = slot, key
            store_to[slot] = store_of[gpu_block_id] = ticket
        return (Transfer(ticket, GPU, CPU, gpu_block_ids, slots),)

    def _through_queue(self, wanted: Blocks, storable: Storable, leaving: Blocks) -> Blocks:
        """What of this, and of what was queued before, is stored now."""
        for key, gpu_block_id in wanted.items():
            self._queue.add(key, gpu_block_id)
        limit = len(self._queue)
        if self._growing:
            # What finds no room waits, and nothing is evicted for it until the GPU loses it.
            self._queue.hurry(tuple(leaving.values())[::-1], tuple(leaving)[::-1])
            limit = self._slots.num_free
        taken, lost = self._queue.take(limit, self._slot_of, storable)
        self.stats.overwritten += lost
        return taken

    def _finish_load(self, keys: Keys, slots: Slots) -> None:
        self.stats.loaded += len(keys)
        _, slots = self._let_go(*self._held.end_read(keys, slots))
        self._policy.unpin(slots[::-1])

    def _finish_store(self, keys: Keys, slots: Slots) -> Keys:
        self.stats.stored += len(keys)
        keys, slots = self._let_go(keys, slots)
        self._policy.insert(slots[::-1])
        return keys

    def _give_up(self, link: LinkTickets, keys: Keys, slots: Slots, reason: str) -> None:
        """Forget the blocks of a failed transfer."""
        self.stats.add_failed(link.link, reason, len(keys))
        for key, slot in zip(keys, slots):
            if self._slot_of.get(key) == slot:
                self.discard(key, "failed")
        if link is self._loads:
            keys, slots = self._held.end_read(keys, slots)
        self._let_go(keys, slots)
