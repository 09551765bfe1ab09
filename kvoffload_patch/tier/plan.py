"""What passes between the tier and the ranks: small, frozen, picklable."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CopyBatch:
    """Blocks moved under one ticket: ``gpu_block_ids[i]`` belongs to ``cpu_slots[i]``."""

    ticket: int
    gpu_block_ids: tuple[int, ...]
    cpu_slots: tuple[int, ...]


@dataclass(frozen=True)
class TransferPlan:
    """One step's transfers, the same for every rank.

    A rank orders its own copies: loads go before the step's forward pass and after everything
    computed so far, stores after it. Waiting for ticket 0 is waiting for nothing.

    Attributes:
        loads: submitted in this order, before the forward pass.
        store: submitted after the forward pass, or None.
        wait_load: the forward pass waits for every load up to this ticket: it may read them, or
            write to blocks that a load which nobody reads still writes to.
        wait_store: the forward pass waits for every store up to this ticket: it may overwrite
            the GPU blocks that they read.
        stores_done: stores known to be done when the plan was made. The loads read only slots
            that these filled, so a rank that is behind waits for its own.
        loads_done: loads known to be done when the plan was made. The store overwrites only
            slots that no later load reads.
        promised_loads: loads whose blocks the prefix cache has already, so that this forward pass
            may read them. A rank on which one of them has failed raises.
        layerwise: whether the forward pass may wait for its loads layer by layer: they belong
            to requests that compute more tokens in it than a decode does.
    """

    loads: tuple[CopyBatch, ...] = ()
    store: CopyBatch | None = None
    wait_load: int = 0
    wait_store: int = 0
    stores_done: int = 0
    loads_done: int = 0
    promised_loads: tuple[int, ...] = ()
    layerwise: bool = False


@dataclass(frozen=True)
class TransferResult:
    """What one rank has done so far: every ticket up to these numbers, per direction.

    Attributes:
        loads_done: last load done.
        stores_done: last store done.
        failed_loads: loads whose bytes did not arrive; they count as done all the same.
        failed_stores: stores whose bytes were not copied; done as well.
            Either is named again until a plan shows that it was taken in.
        num_slots: CPU slots usable so far, from slot 0 on; None says nothing new of them.
        growing: more of them are to come, where their number is said.
    """

    loads_done: int
    stores_done: int
    failed_loads: tuple[int, ...] = ()
    failed_stores: tuple[int, ...] = ()
    num_slots: int | None = None
    growing: bool = False
