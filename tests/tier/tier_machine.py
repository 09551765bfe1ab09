"""A scheduler that uses `OffloadManager` in random steps, with ranks that carry out the plans.

The most important property is checked by the ranks: a load brings exactly the bytes that were
stored under its key, however late each rank is. A key's bytes change with every `clear`, as they do
when weights are replaced, so that nothing from before may come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tier.plans import a_result, store_of
from tier.rank_model import Rank, Step
from tier.tier_model import TierModel

from kvoffload_patch.links import LOAD, STORE
from kvoffload_patch.plan import TransferResult
from kvoffload_patch.tier.manager import OffloadManager
from kvoffload_patch.tier.policies import POLICIES
from kvoffload_patch.tier.recency_model import KeySample

BLOCKS = range(7)
KEYS = range(9)

blocks = st.sampled_from(BLOCKS)
keys = st.sampled_from(KEYS)
queues = st.integers(0, 2)  # compute, loads, stores
key_lists = st.lists(keys, max_size=6)
block_lists = st.lists(blocks, max_size=4, unique=True)


class Gain:
    """Stands for what weighs whether GPU and tier hold different blocks: the machine says it."""

    pays = True

    def __init__(self) -> None:
        self.sample = KeySample()

    def told(self, _: object) -> None:
        pass

    resize = computed = loaded = hit_on_gpu = told


class TierMachine(RuleBasedStateMachine):
    """A scheduler's use of the tier, step by step; the first rank is the one that reports."""

    new_rank: Callable[[], Rank] = Rank
    eviction = "lru"
    store = "eager"
    policies: dict[str, Any] = POLICIES

    @initialize(capacity=st.integers(1, 6))
    def start(self, capacity: int) -> None:
        self.tier = OffloadManager(capacity, self.policies[self.eviction], store=self.store)
        self.gain = Gain()
        if self.store == "auto":
            self.tier._gain = self.gain
        in_order = (self.eviction, self.store) == ("lru", "eager")
        self.model = TierModel(capacity, in_order, self.store == "auto")
        self.model.is_exclusive = lambda: self.tier.lazy
        self.model.stores_at_once = lambda: self.tier._exclusive.stores_at_once
        self.ranks = [type(self).new_rank(), type(self).new_rank()]
        self.epoch = self.sizing = 0
        self.cached: dict[int, int] = {}  # GPU block -> key that it holds after this step
        self.computed: dict[int, int] = {}  # those of them that this step fills, and are not queued
        self.unkeyed: set[int] = set()  # GPU blocks in use that have no key yet
        self.parked: dict[int, dict[int, int | None]] = {}  # load -> destinations and their keys
        self.reads: dict[int, Any] = {}
        self.writes: dict[int, Any] = {}
        self.reports: list[TransferResult] = [a_result(0, 0)]
        self.scratch = 0

    # What the scheduler does within a step

    @rule(filled=st.lists(st.tuples(blocks, keys), min_size=1, max_size=4), queued=st.booleans())
    def compute_blocks(self, filled: list[tuple[int, int]], queued: bool) -> None:
        """Blocks are handed out, and this step's forward pass fills them."""
        for block, key in filled:
            if self._hand_out([block]):
                self._fill(block, key, queued)

    @rule(block=blocks)
    def begin_block(self, block: int) -> None:
        """A block is handed out, and will be full only in a later step."""
        if self._hand_out([block]):
            self.scratch += 1
            self.writes[block] = ("partial", self.scratch)
            self.unkeyed.add(block)

    @rule(block=blocks, key=keys, queued=st.booleans())
    def complete_block(self, block: int, key: int, queued: bool) -> None:
        if block in self.unkeyed:
            self._fill(block, key, queued)

    @rule(block=blocks)
    def uncache_block(self, block: int) -> None:
        """The GPU cache forgets a block before the plan is made."""
        self.cached.pop(block, None)
        self.computed.pop(block, None)

    @rule(block=blocks)
    def queue_cached_block(self, block: int) -> None:
        """A block that is cached already is stored again, should the tier have lost it."""
        if block in self.cached:
            self._queue_store(self.cached[block], block)

    @rule(wanted=block_lists)
    def hit_on_gpu(self, wanted: list[int]) -> None:
        """A request hits blocks of the GPU; some may have lost what it has found there."""
        self.hit_blocks([(block, self.cached.get(block, block)) for block in wanted])

    @rule(wanted=block_lists)
    def look_at_free_blocks(self, wanted: list[int]) -> None:
        """These are free, and will be handed out next."""
        self.look_at(wanted)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        """A prefix that a request has hit; some of it may be gone, or still be written."""
        some = st.sampled_from(sorted(self.model.ready) or KEYS)
        self.touch_prefix(data.draw(st.lists(some | keys, max_size=6)))

    @rule(prefix=st.lists(keys, max_size=6, unique=True))
    def request_ends(self, prefix: list[int]) -> None:
        # The model knows the order of use alone; `prefix_machine` is about prefixes.
        self.tier.request_ended(prefix, rests=None if self.model.in_order else {})
        self.model.request_ended(prefix)

    @precondition(lambda self: self.model.ready)
    @rule(data=st.data(), inline=st.booleans())
    def load(self, data: st.DataObject, inline: bool) -> None:
        free = self.free_blocks()
        wanted = st.lists(st.sampled_from(sorted(self.model.ready)), max_size=min(3, len(free)))
        prefix = data.draw(wanted)
        self.load_prefix(prefix, data.draw(st.permutations(free)), inline)

    @rule()
    def publish_arrived_loads(self) -> None:
        for ticket in list(self.parked):
            if self.tier.load_done(ticket):
                self._publish(ticket)

    @rule(prefix=key_lists, at=st.integers(0, 6))
    def load_what_is_not_readable(self, prefix: list[int], at: int) -> None:
        missing = next((key for key in KEYS if key not in self.model.ready), None)
        if missing is not None:
            readable = [key for key in prefix if key in self.model.ready]
            readable.insert(at, missing)
            with pytest.raises(KeyError, match=f"{missing}"):
                self.tier.begin_load(readable, list(range(len(readable))))

    @rule(wanted=block_lists, can_wait=st.booleans())
    def end_step(self, wanted: Sequence[int] = (), can_wait: bool = False) -> None:
        """These blocks are free, and handed out next, but not before the plan is made."""
        computed = {key: block for block, key in self.computed.items()}
        free = self._free(wanted)
        leaving = self.tier.leaving([b for b, _ in free], [key for _, key in free])
        assert leaving == self.model.leaving(free)

        def storable(block: int, key: int) -> bool:
            return self.cached.get(block) == key

        plan = self.tier.make_plan(storable, computed, leaving, can_wait)
        self.model.take_plan(plan, self.cached, computed, leaving, self.tier.holds, can_wait)
        stored: tuple[Any, ...] = ()
        if plan is not None and store_of(plan) is not None:
            stored = tuple((self.cached[b], self.epoch) for b in store_of(plan).source_ids)
        for rank in self.ranks:
            rank.steps.append(Step(plan, dict(self.reads), dict(self.writes), stored))
        self.reads, self.writes, self.computed = {}, {}, {}

    # What goes on beside the steps

    @rule(
        which=st.integers(0, 1),
        steps=st.integers(0, 2),
        favourite=queues,
        pieces=st.integers(0, 25),
    )
    def rank_works(self, which: int, steps: int, favourite: int, pieces: int) -> None:
        rank = self.ranks[which]
        for _ in range(min(steps, len(rank.steps))):
            rank.submit()
        for _ in range(pieces):
            rank.run(favourite)

    @rule(which=st.integers(0, 1), favourite=queues, eager=st.booleans())
    def rank_catches_up(self, which: int, favourite: int, eager: bool) -> None:
        self.ranks[which].finish(favourite, eager)

    @rule()
    def take_in_the_result(self) -> None:
        self.reports.append(a_result(self.ranks[0].loads_done, self.ranks[0].stores_done))
        self._apply(self.reports[-1])

    @rule(more=st.integers(0, 3))
    def slots_become_usable(self, more: int) -> None:
        """The rank that reports has more slots than it had; every rank has them."""
        rank, num_slots = self.ranks[0], min(8, self.model.capacity + more)
        known = {"num_slots": num_slots, "sizing": self.sizing}
        self.reports.append(a_result(rank.loads_done, rank.stores_done, **known))
        self._apply(self.reports[-1])
        assert self.tier.num_slots == num_slots

    @rule(capacity=st.integers(1, 8))
    def resize(self, capacity: int) -> None:
        """To fewer slots at once; to more as far as every rank says that it has them.

        A rank has drained by then, but nobody has said so, and results of before may come late.
        """
        self.sizing = self.tier.resize(min(capacity, self.model.capacity))
        self.model.resize(capacity)
        for rank in self.ranks:
            rank.finish(0, eager=True)
        self._apply(TransferResult(num_slots=capacity, sizing=self.sizing))
        assert self.tier.num_slots == self.model.capacity == capacity

    @rule(data=st.data())
    def change_policy(self, data: st.DataObject) -> None:
        """What is evicted is checked in its order as long as that is the machine's own."""
        eviction = data.draw(st.sampled_from(sorted(self.policies)))
        self.tier.change_policy(self.policies[eviction])
        self.model.in_order = self.model.in_order and eviction == self.eviction

    @precondition(lambda self: self.store == "auto")
    @rule(pays=st.booleans())
    def weigh(self, pays: bool) -> None:
        """From the next plan on."""
        self.gain.pays = pays

    @rule(data=st.data())
    def take_in_a_stale_result(self, data: st.DataObject) -> None:
        self._apply(data.draw(st.sampled_from(self.reports)))

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.model.clear()
        self.epoch += 1
        self.cached, self.computed = {}, {}
        for destinations in self.parked.values():
            destinations.update(dict.fromkeys(destinations))

    @rule(favourite=queues, eager=st.booleans())
    def drain(self, favourite: int, eager: bool) -> None:
        """Everything is carried out; then nothing is under way and every key has its bytes."""
        self.end_step()
        for rank in self.ranks:
            rank.finish(favourite, eager)
        assert self.tier.drained() == a_result(self.ranks[0].loads_done, self.ranks[0].stores_done)
        self._apply(self.tier.drained())
        assert not self.tier.busy
        assert self.tier.num_used == len(self.model.slot_of), "a slot was lost"
        for key, slot in self.model.slot_of.items():
            assert self.tier.lookup(key)
            assert all(self.slot_content(r, slot) == (key, self.epoch) for r in self.ranks)

    @invariant()
    def the_state_is_that_of_the_model(self) -> None:
        assert {key for key in KEYS if self.tier.lookup(key)} == self.model.ready
        assert {key for key in KEYS if self.tier.holds(key)} == set(self.model.slot_of)
        assert self.tier.num_used == len(self.model.used) <= self.model.capacity
        assert self.tier.busy == bool(self.model.loads or self.model.stores)
        assert vars(self.tier.stats) == self.model.counts
        self._check_that_all_that_came_is_here_or_was_counted_out()
        assert all(
            self.tier.load_done(t) == (t <= self.model.loads_done)
            for t in range(1, self.model.last_load + 2)
        )

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.drain(favourite=2, eager=True)

    # The same without strategies

    def slot_content(self, rank: Rank, slot: int) -> Any:
        return rank.slots[slot]

    def free_blocks(self) -> list[int]:
        """Blocks that can be handed out: no load goes into them."""
        return [block for block in BLOCKS if not self._is_destination(block)]

    def touch_prefix(self, order: list[int]) -> None:
        self.tier.touch(order)
        self.model.touch(order)

    def hit_blocks(self, prefix: list[tuple[int, int]]) -> None:
        blocks, keys = [block for block, _ in prefix], [key for _, key in prefix]
        self.tier.hit_on_gpu(blocks, keys, lambda block, key: self.cached.get(block) == key)
        self.model.hit_on_gpu(prefix, self.cached)

    def look_at(self, wanted: list[int]) -> None:
        free = self._free(wanted)
        found = self.tier.about_to_lose([b for b, _ in free], [key for _, key in free])
        assert found == self.model.about_to_lose(free)

    def load_prefix(self, prefix: list[int], free: list[int], inline: bool) -> None:
        into = free[: len(prefix)]
        self._hand_out(into)
        ticket = self.tier.begin_load(prefix, into)
        assert ticket == self.model.begin_load(prefix, into), "tickets increase by one"
        self.parked[ticket] = dict(zip(into, prefix))
        if inline:
            self._publish(ticket)

    # Inside

    def _free(self, wanted: Sequence[int]) -> list[tuple[int, int]]:
        """Of these blocks those that hold something and are not being filled, with their keys."""
        filled = set(self.computed) | self.unkeyed
        return [(b, self.cached[b]) for b in wanted if b in self.cached and b not in filled]

    def _is_destination(self, block: int) -> bool:
        return any(block in destinations for destinations in self.parked.values())

    def _hand_out(self, wanted: list[int]) -> bool:
        """Hand out blocks, unless a load that is not published yet goes into one."""
        if any(self._is_destination(block) for block in wanted):
            return False
        self.tier.note_new_blocks(wanted)
        self.model.note_new_blocks(wanted)
        if self.tier.lazy:
            self._count_lost(wanted)
        for block in wanted:
            self.cached.pop(block, None)
            self.computed.pop(block, None)
            self.unkeyed.discard(block)
            self.reads.pop(block, None)
            self.writes.pop(block, None)
        return True

    def _count_lost(self, wanted: Sequence[int]) -> None:
        """What the GPU held alone counts, too, as far as the tier was told of it."""
        found, counts = self.tier.stats.overwritten, self.model.counts
        assert counts["overwritten"] <= found <= counts["overwritten"] + len(wanted)
        counts["overwritten"] = found

    def _fill(self, block: int, key: int, queued: bool) -> None:
        self.unkeyed.discard(block)
        self.writes[block] = (key, self.epoch)
        self.cached[block] = key
        if queued:
            self._queue_store(key, block)
        else:
            self.computed[block] = key

    def _queue_store(self, key: int, block: int) -> None:
        self.tier.queue_store(key, block)
        self.model.queue_store(key, block)

    def _publish(self, ticket: int) -> None:
        """The forward pass of this step may read what was loaded, or overwrite it."""
        self.tier.expose_load(ticket)
        self.model.expose_load(ticket)
        for block, key in self.parked.pop(ticket).items():
            if key is not None:  # forgotten by clear() otherwise
                self.cached[block] = key
                self.reads[block] = (key, self.epoch)

    def _check_that_all_that_came_is_here_or_was_counted_out(self) -> None:
        stats = self.tier.stats
        came = stats.stored + sum(len(ticket.keys) for ticket in self.model.stores)
        assert came == len(self.model.slot_of) + stats.evicted + sum(stats.removed.values())

    def _apply(self, result: TransferResult) -> None:
        readable = self.tier.apply(result)
        if result.sizing == self.sizing:
            self.model.capacity = max(self.model.capacity, result.num_slots or 0)
        assert len(readable) == len(set(readable))
        assert set(readable) == self.model.apply(result.done_on(LOAD), result.done_on(STORE))
