"""Carries out the plans of the tier on one rank, in the order that keeps bytes right."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from kvoffload_patch.links import GPU, LOAD, Link, Tickets
from kvoffload_patch.plan import Transfer, TransferPlan, TransferResult
from kvoffload_patch.transfer.backends.base import CopyBackend
from kvoffload_patch.transfer.deadline import DeadlineWatch
from kvoffload_patch.transfer.device import device_of
from kvoffload_patch.transfer.dropped import Leftovers
from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.link import Copy, LinkCopies, copies_of
from kvoffload_patch.transfer.queue import CopyQueue, SyncCopyQueue
from kvoffload_patch.transfer.thread import CopyThread
from kvoffload_patch.transfer.tuning import (
    POLL_S,
    STEP_LOAD_SLICES,
    STEP_STORE_SLICES,
    THREAD_LOAD_SLICES,
    THREAD_STORE_SLICES,
)
from kvoffload_patch.transfer.turns import ALONE, Turn


class CopyEngine:
    """Submits each plan once, and knows what is done. It owns no cache state.

    The order on each rank, by events on its own streams:

    - the forward pass waits for the copies that read GPU blocks it may overwrite, and for those
      that bring blocks it may read;
    - a transfer before the forward pass writes its GPU blocks after everything computed before it
      (they may be in use); one after it reads them when they are filled;
    - a transfer reads and writes blocks of other places after the copies of other links that the
      plan knows to be done (`link.must_follow`).

    Args:
        layout: the KV tensors of this rank.
        backend: moves the bytes between GPU and CPU.
        wait_ready: called with a number of slots before any of them is used: returns when so
            many are usable, or raises.
        more: what copies on further links.
        turn: to which CPU slots this rank stores.
        end: ends the process of this rank, when a copy never ends and nobody is left who could
            raise it. None: that process is not to be ended.
    """

    def __init__(
        self,
        layout: BlockLayout,
        backend: CopyBackend,
        wait_ready: Callable[[int], None] | None = None,
        more: Mapping[Link, Copy] | None = None,
        turn: Turn = ALONE,
        end: Callable[[], object] | None = None,
    ) -> None:
        self._layout, self._device = layout, device_of(layout.device)
        self._end = end
        self._busy = False  # a step has begun and not ended, or copies are waited for
        self._deferred: TransferPlan | None = None  # its transfers after the forward pass wait
        self._groups = len(backend.groups)
        # What the forward pass waits for by layer, and until which load.
        self._arriving: Sequence[Any] = ()
        self._last_arriving = 0
        self._waited = set[tuple[Hashable, int]]()  # by which stream, for which of its groups
        self._thread: CopyThread | None = None
        self._watch: DeadlineWatch | None = None
        lock, bad = threading.RLock(), dict[str, set[int]]()
        self._links = {
            link: LinkCopies(link, copy, self._new_queue(link, lock), bad, wait_ready, turn)
            for link, copy in {**copies_of(backend), **(more or {})}.items()
        }
        self._all = list(self._links.values())
        for link in self._all:
            link.connect(self._links)
        self._into_gpu = [link for link in self._all if link.link[1] == GPU]
        self._out_of_gpu = [link for link in self._all if link.link[0] == GPU]
        if not self._device.is_host:
            self._start_threads()

    def begin_step(self, plan: TransferPlan | None, by_layer: bool = False) -> bool:
        """Before the forward pass: submit loads, and make it wait for what it needs.

        Args:
            by_layer: whether `wait_group` can be called for each group of rows before the forward
                pass reads it, and `wait_all_groups` after it, instead of waiting here.

        Returns:
            Whether they must be.

        Raises:
            TransferError: a plan was lost or came twice, the copy thread has ended, or a copy is
                past its deadline.
        """
        self._check_deadlines()
        self._busy = True
        self.wait_all_groups()  # of a forward pass that did not come to its end
        if self._deferred:  # its step has not ended
            self._submit_after()
        if plan is None:
            self._wake()  # raises if no thread enqueues any more
            return False
        for link in self._all:
            wait, done = plan.waits_for(link.link), plan.known_done(link.link)
            link.forget(done)
            if link.link[0] == GPU:
                link.queue.hold(None, wait)
        for transfer in plan.before:
            self._link(transfer).submit(transfer, plan.done)
        for link in self._into_gpu:
            last = plan.waits_for(link.link)
            if by_layer and self._comes_by_layer(link, plan):
                last -= 1
            link.queue.hold(None, last)
        self._deferred = plan
        for link in self._into_gpu:
            # With none under way the bus would be idle before the step has been launched.
            if link.queue.queued and link.queue.has_room(1):
                link.queue.top_up(THREAD_LOAD_SLICES)
        self._wake()
        return bool(self._arriving)

    def wait_group(self, group: int) -> None:
        """Make the current stream wait for a group of rows of what comes by layer.

        Once for all layers of the group: each wait costs the host time, while the device waits for
        what it launches.
        """
        if self._arriving:
            waited = self._device.current_stream_id(), group
            if waited not in self._waited:
                self._waited.add(waited)
                self._device.current_stream().wait_event(self._arriving[group])

    def wait_all_groups(self) -> None:
        """Make the current stream wait for all of it; no `wait_group` is called for it any more."""
        if self._arriving:
            self._arriving = ()
            self._links[LOAD].queue.hold(None, self._last_arriving)

    def end_step(self) -> None:
        """After the forward pass: submit the stores of the plan begun last.

        The device has work now, so this is the time to give the bus some as well. What is small
        is enqueued here as a whole: waking the thread for it costs the next step more.

        Raises:
            TransferError: a plan was lost or came twice, or the copy thread has ended.
        """
        self._submit_after()
        self._top_up_stores()
        # The bus goes both ways at once: a long load is no reason for it to run dry of stores.
        for link in self._into_gpu:
            link.queue.top_up(STEP_LOAD_SLICES, meanwhile=self._top_up_stores)
        self._wake()
        self._busy = False

    def step_raised(self) -> None:
        """The step has raised: no end of it follows, and its thread waits for no copy any more."""
        self._busy = False

    def poll(self) -> TransferResult:
        """What is done; never waits.

        Raises:
            TransferError: a copy is past its deadline.
        """
        self._check_deadlines()
        links = self._all
        done = tuple([(link.link, link.poll()) for link in links])
        return TransferResult(done, tuple([one for link in links for one in link.failed()]))

    def wait_loads(self, timeout_s: float) -> None:
        """Sleep until another load is done, if any is to come; ``timeout_s`` at most."""
        queues, until = [link.queue for link in self._into_gpu], time.monotonic() + timeout_s
        before = [queue.poll() for queue in queues]
        while any(queue.queued or queue.under_way for queue in queues):
            if [queue.poll() for queue in queues] != before or time.monotonic() >= until:
                return
            time.sleep(POLL_S)

    def wait_done(self, tickets: Tickets) -> None:
        """Sleep until these copies, which the forward pass was made to wait for, are done.

        Raises:
            TransferError: one of them is past its deadline.
        """
        for link, ticket in tickets:
            while self._links[link].queue.poll() < ticket:
                self._check_deadlines()
                time.sleep(POLL_S)

    def failed(self, tickets: Tickets) -> tuple[Link, int, str] | None:
        """The first of these copies that has failed, and why; never waits.

        A failure is known once the copy was to be enqueued, and one of its bytes once it is done,
        until a plan shows that the scheduler has heard of it.
        """
        for link, ticket in tickets:
            found = self._links[link].queue.failed.get(ticket)
            if found is not None:
                return link, ticket, found.text
        return None

    def drain(self) -> bool:
        """Submit what is left of the plans so far, and wait for all copies.

        Returns:
            Whether no copy has failed that the scheduler may not have heard of.

        Raises:
            TransferError: a copy is past its deadline.
        """
        self._check_deadlines()
        self._busy = True
        try:
            self._submit_after()
            for link in self._all:
                link.queue.drain(self._check_deadlines)
        finally:
            self._busy = False
        return not any(link.queue.failed for link in self._all)

    def close(self) -> None:
        """Drain, and take no more plans. The copy thread ends even if draining raises."""
        try:
            self.drain()
        finally:
            if self._thread is not None:
                self._thread.close()
            if self._watch is not None:
                self._watch.close()

    def _comes_by_layer(self, link: LinkCopies, plan: TransferPlan) -> bool:
        """Whether the last load that this step waits for is awaited group by group.

        One that it reads may be. Not one whose blocks it writes to, because a layer writes its KV
        before it waits for its group: one that nobody reads, and the last block of a prompt, which
        the step that loads it computes the last token of.
        """
        last = plan.waits_for(link.link)
        read = self._groups and (link.link, last) in plan.promised
        if not read or any(t.ticket == last and len(t.target_ids) == 1 for t in plan.before):
            return False
        if link.link == LOAD and link.queue.poll() < last:
            self._last_arriving = last
            arriving = link.queue.arrivals(last)
            if len(arriving) == self._groups:
                self._arriving = arriving
                self._waited.clear()
        return bool(self._arriving)

    def _submit_after(self) -> None:
        """Submit what goes after the forward pass."""
        plan, self._deferred = self._deferred, None
        if plan is not None:
            for transfer in plan.after:
                self._link(transfer).submit(transfer, plan.done)

    def _top_up_stores(self) -> None:
        for link in self._out_of_gpu:
            link.queue.top_up(STEP_STORE_SLICES)

    def _link(self, transfer: Transfer) -> LinkCopies:
        try:
            return self._links[transfer.source, transfer.target]
        except KeyError:
            raise TransferError(
                f"expected a transfer on one of the links {list(self._links)}, found one from "
                f"{transfer.source} to {transfer.target}."
            ) from None

    def _start_threads(self) -> None:
        others = [link.queue for link in self._all if link not in self._into_gpu]
        self._thread = CopyThread(self._device, [link.queue for link in self._into_gpu], others)
        try:
            self._watch = self._new_watch(self._thread)
            self._watch.start()
        except BaseException:  # nobody will have this engine, so nobody would close it
            self._thread.close()
            raise

    def _new_watch(self, thread: CopyThread) -> DeadlineWatch:
        queues = {link.link: link.queue for link in self._all if isinstance(link.queue, CopyQueue)}
        engine = weakref.ref(self)  # or nobody could drop it

        def is_busy() -> bool:
            watched = engine()
            return watched is not None and watched._busy

        # Links keep the backend, and by `wait_ready` the memory of the slots with what gives it
        # back; the layout keeps the KV tensors.
        left = Leftovers(self, thread, [*queues.values()], self._all, self._layout)
        return DeadlineWatch(queues, self._device.use, is_busy, self._end, left.are_over)

    def _check_deadlines(self) -> None:
        if self._watch is not None and self._watch.overdue:
            self._watch.check()

    def _wake(self) -> None:
        if self._thread is None:
            return
        if any(link.queue.queued for link in self._all):
            self._thread.wake()

    def _new_queue(self, link: Link, lock: threading.RLock) -> CopyQueue | SyncCopyQueue:
        device = self._device
        if device.is_host:
            return SyncCopyQueue()
        if link[1] == GPU:
            # What a request waits for; the others can take their time.
            groups = self._groups if link == LOAD else 0
            return CopyQueue(device, lock, False, STEP_LOAD_SLICES, groups, priority=-1)
        return CopyQueue(device, lock, True, THREAD_STORE_SLICES)
