"""What `OffloadManager` must do, said with plain dicts and without regard for cost."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tier.plans import a_load, store_of

from kvoffload_patch.links import CPU, GPU, LOAD, STORE
from kvoffload_patch.plan import Transfer, TransferPlan
from kvoffload_patch.tier import queues
from kvoffload_patch.tier.stats import TierStats


@dataclass
class OpenTicket:
    """A transfer that is not known to be done."""

    number: int
    keys: tuple[Hashable, ...]
    gpu_block_ids: tuple[int, ...]
    slots: tuple[int, ...]


class TierModel:
    """Who is where, who is readable, and who goes next. Nothing here is counted or cached."""

    def __init__(self, capacity: int, in_order: bool, stores_ahead: bool) -> None:
        self.capacity = capacity
        self.stores_ahead = stores_ahead  # while slots are free, if GPU and tier are exclusive
        self.is_exclusive: Callable[[], bool] = lambda: False
        self.stores_at_once: Callable[[], bool] = lambda: False  # all, even so
        self.in_order = in_order  # evicted is what was used least recently
        self.slot_of: dict[Hashable, int] = {}
        self.ready: set[Hashable] = set()
        self.recency: list[Hashable] = []  # readable keys, least recently used first
        self.pending: dict[int, Hashable] = {}
        self.waiting: dict[int, Hashable] = {}  # GPU blocks that wait to be stored
        self.steps_waited = 0  # by some of these
        self.ended: list[tuple[int, int, Sequence[Hashable]]] = []  # with the last copies then
        self.store_of: dict[int, int] = {}  # GPU block -> its last store
        self.loads: list[OpenTicket] = []
        self.stores: list[OpenTicket] = []
        self.new_loads: list[Transfer] = []
        self.last_load = self.last_store = 0
        self.loads_done = self.stores_done = 0
        self.wait_load = self.wait_store = self.waited = 0
        self.promised: list[int] = []
        self.counts = vars(TierStats()).copy()

    @property
    def under_way(self) -> set[int]:
        """Slots that a transfer reads or writes."""
        return {slot for ticket in self.loads + self.stores for slot in ticket.slots}

    @property
    def used(self) -> set[int]:
        return {s for s in self.under_way | set(self.slot_of.values()) if s < self.capacity}

    @property
    def evictable(self) -> list[Hashable]:
        return [key for key in self.recency if self.slot_of[key] not in self.under_way]

    def touch(self, keys: Sequence[Hashable]) -> None:
        for key in reversed(keys):
            if key in self.ready:
                self.recency.remove(key)
                self.recency.append(key)

    def request_ended(self, keys: Sequence[Hashable]) -> None:
        self.ended.append((self.last_store + (self.steps_waited > 0), self.last_load, keys))
        self._regroup_ended()

    def queue_store(self, key: Hashable, gpu_block_id: int) -> None:
        if key not in self.slot_of:
            self.pending[gpu_block_id] = key

    def hit_on_gpu(
        self, prefix: Sequence[tuple[int, Hashable]], cached: Mapping[int, Hashable]
    ) -> None:
        self.touch([key for _, key in prefix])
        if self._stores_all():
            for block, key in prefix:
                if cached.get(block) == key:
                    self.queue_store(key, block)

    def about_to_lose(self, blocks: Sequence[tuple[int, Hashable]]) -> int:
        leaving = self.leaving(blocks)
        self.pending.update({block: key for key, block in leaving.items()})
        return len(leaving)

    def leaving(self, blocks: Sequence[tuple[int, Hashable]]) -> dict[Hashable, int]:
        if not self.is_exclusive():
            return {}
        last = {key: block for block, key in blocks if key not in self.slot_of}
        return dict(reversed(last.items()))

    def note_new_blocks(self, gpu_block_ids: Iterable[int]) -> None:
        for block in gpu_block_ids:
            for kept in (self.pending, self.waiting):
                self.counts["overwritten"] += kept.pop(block, None) is not None
            # Waited for even when it is known to be done: another rank may be behind.
            last = self.store_of.get(block, 0)
            if last > self.waited:  # else a forward pass has waited for it
                self.wait_store = max(self.wait_store, last)
        if not self.waiting:
            self.steps_waited = 0

    def begin_load(self, keys: Sequence[Hashable], gpu_block_ids: Sequence[int]) -> int:
        self.last_load += 1
        slots = tuple(self.slot_of[key] for key in keys)
        ticket = OpenTicket(self.last_load, tuple(keys), tuple(gpu_block_ids), slots)
        self.loads.append(ticket)
        self.new_loads.append(a_load(ticket.number, ticket.gpu_block_ids, slots))
        return self.last_load

    def expose_load(self, ticket: int) -> None:
        self.await_load(ticket)
        self.promised.append(ticket)

    def await_load(self, ticket: int) -> None:
        self.wait_load = max(self.wait_load, ticket)

    def take_plan(
        self,
        plan: TransferPlan | None,
        cached: Mapping[int, Hashable],
        computed: Mapping[Hashable, int],
        leaving: Mapping[Hashable, int],
        holds: Callable[[Hashable], bool],
        can_wait: bool = False,
    ) -> None:
        """Check a plan against what must be in it, and follow it.

        Args:
            plan: what the manager made.
            cached: GPU block id -> the key that it holds after this step.
            computed, leaving, can_wait: as the manager was given them.
            holds: whether the tier still has a key.
        """
        hurries = leaving or self.pending or self.is_exclusive()
        waiting: dict[Hashable, int] = {}
        if not can_wait or hurries or not self._waits(computed):
            computed = {**self._waited(cached), **computed}
            offered = self._offered(computed, len(leaving))
            waiting = self._to_store(cached, {**leaving, **offered})
        chosen = [key for key in self.evictable if self.in_order or not holds(key)]
        while len(waiting) > self.capacity - len(self.used) and self.evictable:
            if not chosen:  # what is pinned or written may rest on all that could leave
                assert not (self.in_order or self.is_exclusive()) and self.under_way
                break
            self._evict(chosen.pop(0))
        fitting = list(waiting)[: self.capacity - len(self.used)]
        self.counts["dropped"] += len(waiting) - len(fitting)
        if not (fitting or self.new_loads or self.wait_load or self.wait_store):
            assert plan is None, "a plan with nothing in it"
            return
        assert plan is not None
        assert list(plan.before) == self.new_loads, "each load is planned once and in order"
        assert (plan.waits_for(LOAD), plan.waits_for(STORE)) == (self.wait_load, self.wait_store)
        done = (plan.known_done(LOAD), plan.known_done(STORE))
        assert done == (self.loads_done, self.stores_done)
        assert plan.promised == tuple((LOAD, ticket) for ticket in self.promised)
        self.new_loads, self.promised = [], []
        self.waited = max(self.waited, self.wait_store)
        self.wait_load = self.wait_store = 0
        self._take_store(store_of(plan), fitting, [waiting[key] for key in fitting])

    def apply(self, loads_done: int, stores_done: int) -> set[Hashable]:
        """Returns the keys that became readable."""
        while self.loads and self.loads[0].number <= loads_done:
            ticket = self.loads.pop(0)
            self._used_now(ticket)
            self.counts["loaded"] += len(ticket.slots)
        readable: set[Hashable] = set()
        while self.stores and self.stores[0].number <= stores_done:
            ticket = self.stores.pop(0)
            at_home = {key for key, slot in self._pairs(ticket) if self.slot_of.get(key) == slot}
            self.ready |= at_home
            self.recency += at_home
            readable |= at_home
            self._used_now(ticket)
            self.counts["stored"] += len(ticket.slots)
        self.loads_done = max(self.loads_done, min(loads_done, self.last_load))
        self.stores_done = max(self.stores_done, min(stores_done, self.last_store))
        self._regroup_ended()
        return readable

    def clear(self) -> None:
        self.counts["removed"]["reset"] += len(self.slot_of)
        self.slot_of, self.ready, self.recency, self.pending = {}, set(), [], {}
        self.ended, self.waiting, self.steps_waited = [], {}, 0

    def resize(self, capacity: int) -> None:
        """Slots from ``capacity`` on are given up, if there are any."""
        self.capacity = min(self.capacity, capacity)
        for key, slot in list(self.slot_of.items()):
            if slot >= capacity:
                self.counts["removed"]["resized"] += 1
                del self.slot_of[key]
                self.ready.discard(key)
                if key in self.recency:
                    self.recency.remove(key)

    def _stores_all(self) -> bool:
        return not self.is_exclusive() or self.stores_at_once()

    def _waits(self, computed: Mapping[Hashable, int]) -> bool:
        """Whether what is computed waits, with what does, for what steps to come compute."""
        self.waiting.update({block: key for key, block in computed.items()})
        self.steps_waited += bool(self.waiting)
        few = 0 < len(self.waiting) < queues.TOGETHER_BLOCKS
        return few and self.steps_waited < queues.TOGETHER_STEPS

    def _waited(self, cached: Mapping[int, Hashable]) -> dict[Hashable, int]:
        """What waits no more, as far as its blocks still hold it."""
        waited = [(key, block) for block, key in self.waiting.items() if cached.get(block) == key]
        self.counts["overwritten"] += len(self.waiting) - len(waited)
        self.waiting, self.steps_waited = {}, 0
        return dict(waited)

    def _regroup_ended(self) -> None:
        while self.ended and self._copied(*self.ended[0][:2]):
            self.touch(self.ended.pop(0)[2])

    def _copied(self, store: int, load: int) -> bool:
        over = self.stores_done == self.last_store and not self.steps_waited
        return store <= self.stores_done + over and load <= self.loads_done

    def _offered(self, computed: Mapping[Hashable, int], others: int) -> Mapping[Hashable, int]:
        """What is stored as it is computed."""
        self.counts["held"] += sum(key in self.slot_of for key in computed)
        if self._stores_all():
            return computed
        missed = [(key, block) for key, block in computed.items() if key not in self.slot_of]
        room = self.capacity - len(self.used) - len(self.pending) - others
        return dict(missed[: max(0, room if self.stores_ahead else 0)])

    def _to_store(
        self, cached: Mapping[int, Hashable], computed: Mapping[Hashable, int]
    ) -> dict[Hashable, int]:
        waiting: dict[Hashable, int] = {}
        for block, key in self.pending.items():
            if key in self.slot_of:
                continue
            if cached.get(block) == key:
                waiting.setdefault(key, block)
            elif block not in [b for k, b in computed.items() if k not in self.slot_of]:
                self.counts["overwritten"] += 1
        for key, block in computed.items():
            if key not in self.slot_of:
                waiting.setdefault(key, block)
        self.pending = {}
        return waiting

    def _take_store(self, store: Transfer | None, keys: list[Hashable], blocks: list[int]) -> None:
        if not keys:
            assert store is None
            return
        assert store is not None
        self.last_store += 1
        assert store.ticket == self.last_store
        assert (store.source, store.target) == (GPU, CPU)
        assert list(store.source_ids) == blocks
        assert len(store.target_ids) == len(set(store.target_ids)) == len(keys)
        assert not self.used.intersection(store.target_ids), "a slot is held twice"
        assert all(0 <= slot < self.capacity for slot in store.target_ids)
        self.slot_of.update(zip(keys, store.target_ids))
        self.store_of.update(dict.fromkeys(blocks, store.ticket))
        self.stores.append(
            OpenTicket(store.ticket, tuple(keys), store.source_ids, store.target_ids)
        )

    def _evict(self, key: Hashable) -> None:
        del self.slot_of[key]
        self.ready.remove(key)
        self.recency.remove(key)
        self.counts["evicted"] += 1

    def _used_now(self, ticket: OpenTicket) -> None:
        home = [key for key, slot in self._pairs(ticket) if self.slot_of.get(key) == slot]
        self.touch(home)

    @staticmethod
    def _pairs(ticket: OpenTicket) -> list[tuple[Hashable, int]]:
        return list(zip(ticket.keys, ticket.slots))
