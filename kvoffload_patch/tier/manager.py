"""The state of the tier: keys, slots, pins and tickets. See the package for the protocol."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from kvoffload_patch.links import CPU, GPU, LOAD, STORE, Link
from kvoffload_patch.tier.entries import Block, LinkTickets
from kvoffload_patch.tier.plan import Transfer, TransferPlan, TransferResult
from kvoffload_patch.tier.policy import EvictionPolicy, LRUPolicy
from kvoffload_patch.tier.slots import SlotPool
from kvoffload_patch.tier.stats import TierStats


class OffloadManager:
    """Owns the CPU slots of one scheduler; every rank holds the bytes of the same slots.

    Every operation costs O(1) for each block that it names; none walks the tier.

    Args:
        num_slots: slots usable at first; more become usable by `apply`.
        policy: makes the eviction policy, and another one after each `clear`.
        growing: more slots are to come.
    """

    def __init__(
        self,
        num_slots: int,
        policy: Callable[[], EvictionPolicy] = LRUPolicy,
        growing: bool = False,
    ) -> None:
        self.num_slots = num_slots
        self.stats = TierStats()
        self._new_policy = policy
        self._policy = policy()
        self._slots = SlotPool(num_slots)
        self._growing = growing
        self._blocks: dict[Hashable, Block] = {}
        self._pending: dict[int, Hashable] = {}  # GPU block id -> key, not yet planned
        self._loads, self._stores = LinkTickets(LOAD), LinkTickets(STORE)
        self._links = {LOAD: self._loads, STORE: self._stores}
        self._store_of: dict[int, int] = {}  # GPU block id -> ticket of its last store
        self._new_loads: list[Transfer] = []
        self._promised: list[tuple[Link, int]] = []

    @property
    def num_used(self) -> int:
        """Slots in use, those being written included."""
        return self.num_slots - self._slots.num_free

    @property
    def busy(self) -> bool:
        """Whether any planned transfer is not known to be done."""
        return any(link.under_way for link in self._links.values())

    # Looking up

    def lookup(self, key: Hashable) -> str | None:
        """The place from which the block of ``key`` can be loaded now; None if there is none."""
        block = self._blocks.get(key)
        return CPU if block is not None and block.ready else None

    def holds(self, key: Hashable) -> bool:
        """Whether ``key`` has a slot, readable or still being written."""
        return key in self._blocks

    def touch(self, keys: Sequence[Hashable]) -> None:
        """Refresh the recency of a prefix, given head first; the head ends most recent.

        A block is worth nothing without those before it, so a prefix is evicted from its tail.
        """
        for key in reversed(keys):
            if (block := self._blocks.get(key)) and block.ready and not block.ref_cnt:
                self._policy.touch(key)

    # Storing

    def queue_store(self, key: Hashable, gpu_block_id: int) -> None:
        """``gpu_block_id`` holds, or will hold after this step, the block of ``key``."""
        if not self.holds(key):
            self._pending[gpu_block_id] = key

    def note_new_blocks(self, gpu_block_ids: Iterable[int]) -> None:
        """These GPU blocks were handed out to be overwritten.

        A store of theirs that is not planned is dropped; the last one that was planned is waited
        for by the next plan's forward pass, known to be done or not: another rank may be behind.
        """
        if not self._pending and not self._store_of:
            return
        for gpu_block_id in gpu_block_ids:
            self._pending.pop(gpu_block_id, None)
            ticket = self._store_of.pop(gpu_block_id, 0)
            self._stores.wait_for(ticket)

    def discard(self, key: Hashable) -> None:
        """What the GPU holds, and may have stored, under ``key`` turned out to be wrong."""
        block = self._blocks.pop(key, None)
        if block is not None and not block.ref_cnt:
            self._policy.remove(key)
            self._slots.free(block.slot)
        # Else a ticket holds its slot, and gives it back when it is done.

    # Loading

    def begin_load(self, keys: Sequence[Hashable], gpu_block_ids: Sequence[int]) -> int:
        """Plan a load of readable keys into GPU blocks; returns its ticket.

        Raises:
            KeyError: a key is not readable. Nothing has changed then.
        """
        blocks = [self._blocks[key] for key in keys]
        for block in blocks:
            if not block.ready:
                raise KeyError(block.key)
        for block in blocks:
            self._pin(block)
        ticket = self._loads.give_out(blocks)
        slots = tuple(block.slot for block in blocks)
        self._new_loads.append(Transfer(ticket, CPU, GPU, slots, tuple(gpu_block_ids)))
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
        self, storable: Callable[[int, Hashable], bool], layerwise: bool = False
    ) -> TransferPlan | None:
        """Freeze this step's plan; None when there is nothing to move and to wait for.

        Args:
            storable: whether a GPU block still has, and will have computed after this step,
                the block of a key. What is not is forgotten.
            layerwise: as in the plan.
        """
        store = self._plan_store(storable)
        links = self._links.values()
        waits = tuple([(link.link, link.wait) for link in links if link.wait])
        if not (self._new_loads or store or waits):
            return None
        done = tuple([(link.link, link.done) for link in links if link.done])
        promised = tuple(self._promised)
        plan = TransferPlan(tuple(self._new_loads), store, waits, done, promised, layerwise)
        self._new_loads.clear()
        self._promised.clear()
        for link in links:
            link.planned()
        return plan

    def apply(self, result: TransferResult) -> list[Hashable]:
        """Take in what is done, and slots that are new; returns the keys that became readable.

        What a failed store has written is forgotten, and so is what a failed load has read: its
        slots may be the fault.
        """
        readable: list[Hashable] = []
        for name, ticket in result.failed:
            # One that is known to be done was taken in then: it is named until a plan shows that.
            if ticket > self._links[name].done:
                self._links[name].failed.add(ticket)
        if result.num_slots is not None:
            self._growing = result.growing
            if result.num_slots > self.num_slots:
                self.num_slots = result.num_slots
                self._slots.grow(self.num_slots)
        for name, done in result.done:
            link = self._links[name]
            while link.under_way and link.under_way[0][0] <= done:
                ticket, blocks = link.under_way.popleft()
                if ticket in link.failed:
                    self._give_up(blocks)
                elif link is self._loads:
                    self._finish_load(blocks)
                else:
                    readable.extend(self._finish_store(blocks))
            link.done = max(link.done, min(done, link.last))
        return readable

    def load_done(self, ticket: int) -> bool:
        """Whether this load is known to be done; `load_failed` says how it ended."""
        return ticket <= self._loads.done

    def load_failed(self, ticket: int) -> bool:
        """Whether this load failed; to be asked before the plan that follows its end is made."""
        return ticket in self._loads.failed

    def drained(self) -> TransferResult:
        """The result that ranks give once they have finished all that was planned."""
        return TransferResult(tuple([(link.link, link.last) for link in self._links.values()]))

    def clear(self) -> None:
        """Forget every key. Slots of transfers under way come back when those are done."""
        under_way = (blocks for link in self._links.values() for _, blocks in link.under_way)
        held = {block.slot for blocks in under_way for block in blocks}
        self._blocks = {}
        self._pending = {}
        self._policy = self._new_policy()
        self._slots = SlotPool(self.num_slots, reserved=held)

    # Inside

    def _plan_store(self, storable: Callable[[int, Hashable], bool]) -> tuple[Transfer, ...]:
        gpu_block_of = self._take_pending(storable)
        count = self._make_room(len(gpu_block_of))
        self.stats.dropped += len(gpu_block_of) - count
        if not count:
            return ()
        blocks = [Block(key, slot) for key, slot in zip(gpu_block_of, self._slots.allocate(count))]
        ticket = self._stores.give_out(blocks)
        gpu_block_ids = tuple(gpu_block_of[block.key] for block in blocks)
        for block, gpu_block_id in zip(blocks, gpu_block_ids):
            self._blocks[block.key] = block
            self._store_of[gpu_block_id] = ticket
        slots = tuple(block.slot for block in blocks)
        return (Transfer(ticket, GPU, CPU, gpu_block_ids, slots),)

    def _take_pending(self, storable: Callable[[int, Hashable], bool]) -> dict[Hashable, int]:
        """What is to be stored now, and from which GPU block.

        While slots are still coming nothing is evicted for a store: what finds no room waits, as
        long as the GPU keeps it.
        """
        limit = self._slots.num_free if self._growing else len(self._pending)
        taken, looked_at = dict[Hashable, int](), list[int]()
        for gpu_block_id, key in self._pending.items():
            if len(taken) >= limit:
                break
            looked_at.append(gpu_block_id)
            if storable(gpu_block_id, key) and not self.holds(key):
                taken.setdefault(key, gpu_block_id)
        # Not one by one from the front: finding a dict's first item means passing what has left it.
        if len(looked_at) == len(self._pending):
            self._pending.clear()
        for gpu_block_id in looked_at if self._pending else ():
            del self._pending[gpu_block_id]
        return taken

    def _make_room(self, count: int) -> int:
        """Evict until ``count`` slots are free or none can be; returns how many there are."""
        while self._slots.num_free < count and len(self._policy):
            block = self._blocks.pop(self._policy.pop())
            self._slots.free(block.slot)
            self.stats.evicted += 1
        return min(count, self._slots.num_free)

    def _finish_load(self, blocks: list[Block]) -> None:
        # Tail first: the head of the prefix ends most recent.
        for block in reversed(blocks):
            self._unpin(block)
        self.stats.loaded += len(blocks)

    def _finish_store(self, blocks: list[Block]) -> list[Hashable]:
        readable = []
        for block in reversed(blocks):
            block.ready = True
            self._unpin(block)
            if self._blocks.get(block.key) is block:
                readable.append(block.key)
        self.stats.stored += len(blocks)
        return readable

    def _give_up(self, blocks: list[Block]) -> None:
        """Forget the blocks of a failed transfer."""
        for block in blocks:
            if self._blocks.get(block.key) is block:
                del self._blocks[block.key]
            self._unpin(block)
        self.stats.failed += len(blocks)

    def _pin(self, block: Block) -> None:
        if not block.ref_cnt:
            self._policy.remove(block.key)
        block.ref_cnt += 1

    def _unpin(self, block: Block) -> None:
        block.ref_cnt -= 1
        if block.ref_cnt:
            return
        if self._blocks.get(block.key) is block:
            self._policy.add(block.key)
        else:  # forgotten while under way
            self._slots.free(block.slot)
