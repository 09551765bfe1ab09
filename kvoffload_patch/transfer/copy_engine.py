"""Carries out the plans of the tier on one rank, in the order that keeps bytes right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvoffload_patch.transfer.errors import TransferError
from kvoffload_patch.transfer.lane import HostLane, Lane
from kvoffload_patch.transfer.layout import BlockLayout


class CopyBackend(Protocol):
    """Moves whole blocks; enqueues on the current stream, never waits for the device."""

    def load(self, gpu_block_ids: Sequence[int], cpu_slots: Sequence[int]) -> None:
        """CPU slots to GPU blocks."""

    def store(self, gpu_block_ids: Sequence[int], cpu_slots: Sequence[int]) -> None:
        """GPU blocks to CPU slots."""


class Batch(Protocol):
    """Blocks moved under one ticket."""

    @property
    def ticket(self) -> int: ...
    @property
    def gpu_block_ids(self) -> Sequence[int]: ...
    @property
    def cpu_slots(self) -> Sequence[int]: ...


class Plan(Protocol):
    """What the tier plans for one step; `kvoffload_patch.tier.plan` says what it means."""

    @property
    def loads(self) -> Sequence[Batch]: ...
    @property
    def store(self) -> Batch | None: ...
    @property
    def wait_load(self) -> int: ...
    @property
    def wait_store(self) -> int: ...
    @property
    def stores_done(self) -> int: ...
    @property
    def loads_done(self) -> int: ...


class CopyEngine:
    """Submits each plan once, and knows what is done. It owns no cache state.

    The order on each rank, by events on its own streams:

    - the forward pass waits for the stores that read blocks it may overwrite, and for the loads
      that it may read;
    - a load waits for everything computed before it (its destination may be in use), and for
      the stores that filled its slots;
    - a store waits for the forward pass that fills its blocks, and for the loads that read its
      slots before.

    Args:
        layout: the KV tensors of this rank.
        backend: moves the bytes.
    """

    def __init__(self, layout: BlockLayout, backend: CopyBackend) -> None:
        self._backend = backend
        self._deferred: Plan | None = None
        self._last_load = self._last_store = 0
        self._loads: Lane | HostLane
        self._stores: Lane | HostLane
        if layout.device.type == "cpu":
            self._loads, self._stores = HostLane(), HostLane()
        elif layout.device.type == "cuda":
            # Loads are what a request waits for; stores can take their time.
            self._loads, self._stores = Lane(layout.device, priority=-1), Lane(layout.device)
        else:
            raise TransferError(
                f"expected KV tensors on a CPU or CUDA device, found {layout.device}."
            )

    def begin_step(self, plan: Plan | None) -> None:
        """Before the forward pass: submit loads, and make it wait for what it needs."""
        self.end_step()
        if plan is None:
            return
        self._stores.hold(None, plan.wait_store)
        if plan.loads:
            self._loads.follow_compute()
            self._stores.hold(self._loads.stream, plan.stores_done)
            for batch in plan.loads:
                self._submit_load(batch)
        self._loads.hold(None, plan.wait_load)
        self._deferred = plan

    def end_step(self) -> None:
        """After the forward pass: submit the store of the plan begun last, once."""
        plan, self._deferred = self._deferred, None
        if plan is None or plan.store is None:
            return
        self._stores.follow_compute()
        self._loads.hold(self._stores.stream, plan.loads_done)
        batch = plan.store
        if batch.ticket != self._last_store + 1:
            raise _out_of_order("store", self._last_store, batch.ticket)
        self._last_store = batch.ticket
        self._stores.submit(
            batch.ticket, lambda: self._backend.store(batch.gpu_block_ids, batch.cpu_slots)
        )

    def poll(self) -> tuple[int, int]:
        """The last load ticket and the last store ticket done; never waits."""
        return self._loads.poll(), self._stores.poll()

    def drain(self) -> None:
        """Submit what is left of the plan begun last, and wait for all copies."""
        self.end_step()
        self._loads.drain()
        self._stores.drain()

    def _submit_load(self, batch: Batch) -> None:
        if batch.ticket != self._last_load + 1:
            raise _out_of_order("load", self._last_load, batch.ticket)
        self._last_load = batch.ticket
        self._loads.submit(
            batch.ticket, lambda: self._backend.load(batch.gpu_block_ids, batch.cpu_slots)
        )


def _out_of_order(direction: str, last: int, found: int) -> TransferError:
    return TransferError(
        f"expected {direction} ticket {last + 1}, found {found}: a plan was lost or came twice, "
        "so the CPU tier cannot vouch for its bytes."
    )
