"""Carries out the plans of the tier on one rank, in the order that keeps bytes right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from kvoffload_patch.transfer.backends.base import CopyBackend, Slices, Streams
from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.plans import Batch, Plan, Progress
from kvoffload_patch.transfer.queue import CopyQueue, SyncCopyQueue, failed_up_to, forget
from kvoffload_patch.transfer.store_batcher import StoreBatcher
from kvoffload_patch.transfer.thread import LOADS_AHEAD, STORES_AHEAD, CopyThread

_NAP_S = 0.0001
# Slices of loads under way when a step has been launched: about 15 to 30 ms of the bus. While the
# next is launched, the copy thread hardly gets to run: with calls as short as launches, Python
# gives another thread its turn every 5 ms at most.
_LOADS_AHEAD = 24
# With fewer than so many, the bus would be idle before the step has been launched.
_TOO_FEW = 2
_STORES_AT_ONCE = 2  # slices of stores that a step enqueues itself: small ones need no thread
# When the copy thread enqueues stores that were put off, if no step has done so.
_DEFERRED_S = 0.02
# Groups of a load by layer that are enqueued before they are waited for.
_GROUPS_AHEAD = 2


class CopyEngine:
    """Submits each plan once, and knows what is done. It owns no cache state.

    The order on each rank, by events on its own streams:

    - the forward pass waits for the stores that read blocks it may overwrite, and for the loads
      that it may read;
    - a load writes its GPU blocks after everything computed before it (they may be in use), and
      reads its slots after the stores that filled them;
    - a store reads its GPU blocks after the forward pass that fills them, and writes its slots
      after the loads that read them before.

    Args:
        layout: the KV tensors of this rank.
        backend: moves the bytes.
        wait_ready: called with a number of slots before any of them is used: returns when so
            many are usable, or raises.

    Attributes:
        num_groups: parts in which a load by layer arrives; see `begin_step`.
    """

    def __init__(
        self,
        layout: BlockLayout,
        backend: CopyBackend,
        wait_ready: Callable[[int], None] | None = None,
    ) -> None:
        self._backend = backend
        self._wait_ready = wait_ready
        self._deferred: Plan | None = None
        self._batcher = StoreBatcher(layout.block_bytes)
        self._last_load = self._wait_load = 0
        self._told = (0, 0)  # failures up to these tickets
        self._bad_slots: set[int] = set()
        self.num_groups = len(backend.groups)
        self._arrived: list[Any] = []
        self._num_arrived = 0  # groups enqueued
        self._stores_deferred = False  # stores were, by the step before
        self._batches = layout.device.type != "cpu"
        self._thread: CopyThread | None = None
        self._loads: CopyQueue | SyncCopyQueue
        self._stores: CopyQueue | SyncCopyQueue
        if layout.device.type == "cpu":
            self._loads, self._stores = SyncCopyQueue(), SyncCopyQueue()
        elif layout.device.type == "cuda":
            lock = threading.RLock()
            # Loads are what a request waits for; stores can take their time.
            self._loads = CopyQueue(layout.device, lock, False, _LOADS_AHEAD, priority=-1)
            self._stores = CopyQueue(layout.device, lock, True, STORES_AHEAD)
            self._arrived = [torch.cuda.Event() for _ in range(self.num_groups)]
            self._thread = CopyThread(layout.device, self._loads, self._stores)
        else:
            raise TransferError(
                f"expected KV tensors on a CPU or CUDA device, found {layout.device}."
            )

    def begin_step(self, plan: Plan | None, by_layer: bool = False) -> None:
        """Before the forward pass: submit loads, and make it wait for what it needs.

        Args:
            by_layer: bring the loads that this step needs group by group, and do not make the
                forward pass wait for them: `wait_group` and `wait_all_loads` do.
        """
        if self._deferred:  # its step has not ended
            self._submit_stores()
        if plan is None:
            self._wake()  # says so if nobody enqueues any more
            return
        if max(plan.wait_store, plan.stores_done) >= self._batcher.first:
            self._submit_stores()
        # Another rank may have said that they are done: forget what this one has told, only.
        forget(self._loads.failed, min(plan.loads_done, self._told[0]))
        forget(self._stores.failed, min(plan.stores_done, self._told[1]))
        self._stores.hold(None, plan.wait_store)
        self._wait_load = plan.wait_load
        loads = list(plan.loads)
        if by_layer:
            # A load that fails marks no arrival, so those of earlier plans must not rest on it.
            self._loads.hold(None, min(plan.wait_load, self._last_load))
            self._num_arrived = 0
            due = [batch for batch in loads if batch.ticket <= plan.wait_load]
            self._submit_loads(due, plan.stores_done, self._mark_arrived)
            loads = loads[len(due) :]
        for batch in loads:
            self._submit_loads([batch], plan.stores_done, None)
        if by_layer:
            self._enqueue_groups(_GROUPS_AHEAD)
        else:
            self.wait_all_loads()
        self._deferred = plan
        if by_layer:
            return  # its inputs come before more of its loads
        if self._loads.queued and self._loads.has_room(_TOO_FEW):
            self._loads.top_up(LOADS_AHEAD)
        self._wake()

    def wait_group(self, group: int) -> None:
        """Make the current stream wait for one group of the loads brought by layer.

        Those behind it are enqueued here, a few at a time: the step's inputs come before them.
        """
        self._enqueue_groups(group + _GROUPS_AHEAD)
        if self._arrived:
            torch.cuda.current_stream().wait_event(self._arrived[group])

    def wait_all_loads(self) -> None:
        """Make the current stream wait for every load that this step needs."""
        self._loads.hold(None, self._wait_load)

    def end_step(self, defer_stores: bool = False, batch_stores: bool = False) -> None:
        """After the forward pass: submit the store of the plan begun last, now or with others.

        The device has work now, so this is the time to give the bus some as well. What is small
        is enqueued here as a whole: waking the thread for it costs the next step more.

        Args:
            defer_stores: the device is waiting for the host, so stores are enqueued by the next
                step; not twice in a row.
            batch_stores: few blocks are stored: let several such steps' become one copy. Not on
                the CPU device, where the copy itself takes the step's time.
        """
        self._batch_store()
        if self._batcher.step_ends() or not (batch_stores and self._batches):
            self._submit_stores()
        self._stores_deferred = defer_stores and not self._stores_deferred and self._stores.queued
        if self._stores_deferred and self._thread is not None:
            self._thread.wake(_DEFERRED_S)
        self._top_up_stores()
        # The bus goes both ways at once: a long load is no reason for it to run dry of stores.
        self._loads.top_up(_LOADS_AHEAD, meanwhile=self._top_up_stores)
        self._wake()

    def _top_up_stores(self) -> None:
        if not self._stores_deferred:
            self._stores.top_up(_STORES_AT_ONCE)

    def _batch_store(self) -> None:
        plan, self._deferred = self._deferred, None
        if not (plan and plan.store):
            return
        if plan.store.ticket != self._batcher.last + 1:
            raise _out_of_order("store", self._batcher.last, plan.store.ticket)
        self._batcher.add(plan.store, plan.loads_done)

    def _submit_stores(self) -> None:
        self._batch_store()
        stores = self._batcher
        if stores.first:
            start = partial(self._store, stores.gpu_block_ids, stores.cpu_slots)
            self._stores.submit(stores.first, stores.last, start, (self._loads, stores.loads_done))
            stores.clear()

    def poll(self) -> Progress:
        """What is done; never waits."""
        loads, stores = self._loads.poll(), self._stores.poll()
        self._told = (loads, stores)
        if not (self._loads.failed or self._stores.failed):
            return Progress(loads, stores)
        failed_loads = failed_up_to(loads, self._loads.failed)
        return Progress(loads, stores, failed_loads, failed_up_to(stores, self._stores.failed))

    def loads_done(self) -> int:
        """The last load done; 0 while one has failed that the other side may not know of."""
        done = self._loads.poll()
        return 0 if self._loads.failed else done

    def wait_loads(self, timeout_s: float) -> None:
        """Sleep until another load is done, if any is to come; ``timeout_s`` at most."""
        before, until = self._loads.poll(), time.monotonic() + timeout_s
        while (self._loads.queued or self._loads.under_way) and self._loads.poll() == before:
            if time.monotonic() >= until:
                return
            time.sleep(_NAP_S)

    def failed_load(self, tickets: Iterable[int]) -> tuple[int, str] | None:
        """The first of these loads that has failed, and why; never waits.

        A failure is known once the copy was to be enqueued, until a plan shows that the scheduler
        has heard of it.
        """
        failed = self._loads.failed
        return next(((t, failed[t]) for t in tickets if t in failed), None) if failed else None

    def drain(self) -> None:
        """Submit what is left of the plans so far, and wait for all copies."""
        self._submit_stores()
        self._loads.drain()
        self._stores.drain()

    def close(self) -> None:
        """Drain, and take no more plans. The copy thread ends even if draining raises."""
        try:
            self.drain()
        finally:
            if self._thread is not None:
                self._thread.close()

    def _submit_loads(
        self,
        batches: Sequence[Batch],
        stores_done: int,
        arrived: Callable[[int], None] | None,
    ) -> None:
        """Submit batches as one copy."""
        if not batches:
            return
        first = batches[0].ticket
        for batch in batches:
            if batch.ticket != self._last_load + 1:
                raise _out_of_order("load", self._last_load, batch.ticket)
            self._last_load = batch.ticket
        ids, slots = batches[0].gpu_block_ids, batches[0].cpu_slots
        if len(batches) > 1:
            ids = [block for batch in batches for block in batch.gpu_block_ids]
            slots = [slot for batch in batches for slot in batch.cpu_slots]
        start = partial(self._load, ids, slots, arrived=arrived)
        self._loads.submit(first, self._last_load, start, (self._stores, stores_done))

    def _store(self, ids: Sequence[int], slots: Sequence[int], streams: Streams | None) -> Slices:
        # A slot that another rank has and this one has not yet is waited for with the lanes'
        # lock held, so that a step with loads of its own waits as well. That is rare and ends.
        try:
            if self._wait_ready is not None:
                self._wait_ready(max(slots) + 1)
            yield from self._backend.store(ids, slots, streams)
        except BaseException:
            self._bad_slots.update(slots)
            raise
        if self._bad_slots:
            self._bad_slots.difference_update(slots)

    def _load(
        self,
        ids: Sequence[int],
        slots: Sequence[int],
        streams: Streams | None,
        arrived: Callable[[int], None] | None,
    ) -> Slices:
        # On several ranks the scheduler does not hear of a store that failed on this one.
        if self._bad_slots and not self._bad_slots.isdisjoint(slots):
            raise TransferError("a store of some of these blocks has failed on this rank.")
        return self._backend.load(ids, slots, streams, arrived)

    def _enqueue_groups(self, count: int) -> None:
        """Enqueue the first so many groups of what this step's loads bring."""
        while self._num_arrived < min(count, self.num_groups):
            if not (self._loads.has_queued(self._wait_load) and self._loads.advance()):
                return

    def _mark_arrived(self, group: int) -> None:
        if isinstance(self._loads, CopyQueue):
            self._arrived[group].record(self._loads.streams.blocks)
        # Last: the copy thread may be here, and the step waits for the event once it sees this.
        self._num_arrived = group + 1

    def _wake(self) -> None:
        if self._thread is None:
            return
        if self._loads.queued or (self._stores.queued and not self._stores_deferred):
            self._thread.wake()


def _out_of_order(direction: str, last: int, found: int) -> TransferError:
    return TransferError(
        f"expected {direction} ticket {last + 1}, found {found}: a plan was lost or came twice, "
        "so the CPU tier cannot vouch for its bytes."
    )
