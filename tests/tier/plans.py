"""Plans and results between GPU and CPU, in few words."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload_patch.links import CPU, GPU, LOAD, RAISED, STORE, Failure, Link, Tickets
from kvoffload_patch.plan import Transfer, TransferPlan, TransferResult


def a_load(
    ticket: int, gpu_block_ids: Sequence[int], cpu_slots: Sequence[int], compared: bool = False
) -> Transfer:
    return Transfer(ticket, CPU, GPU, tuple(cpu_slots), tuple(gpu_block_ids), compared)


def a_store(ticket: int, gpu_block_ids: Sequence[int], cpu_slots: Sequence[int]) -> Transfer:
    return Transfer(ticket, GPU, CPU, tuple(gpu_block_ids), tuple(cpu_slots))


def a_plan(
    loads: Sequence[Transfer] = (), store: Transfer | None = None, wait_load: int = 0,
    wait_store: int = 0, stores_done: int = 0, loads_done: int = 0,
    promised_loads: Sequence[int] = (),
) -> TransferPlan:  # fmt: skip
    """As the tier makes it: what is 0 is not in it."""
    waits = _some((LOAD, wait_load), (STORE, wait_store))
    done = _some((LOAD, loads_done), (STORE, stores_done))
    after, promised = () if store is None else (store,), _all(LOAD, promised_loads)
    return TransferPlan(tuple(loads), after, waits, done, promised)


def a_result(
    loads_done: int, stores_done: int, failed_loads: Sequence[int] = (),
    failed_stores: Sequence[int] = (), num_slots: int | None = None, growing: bool = False,
    sizing: int = 0, reason: str = RAISED,
) -> TransferResult:  # fmt: skip
    """As a rank reports it."""
    done = ((LOAD, loads_done), (STORE, stores_done))
    tickets = *_all(LOAD, failed_loads), *_all(STORE, failed_stores)
    failed = tuple(Failure(link, ticket, reason) for link, ticket in tickets)
    return TransferResult(done, failed, num_slots, growing, sizing=sizing)


def store_of(plan: TransferPlan | None) -> Transfer | None:
    """The store of a plan, if it has one."""
    if plan is None or not plan.after:
        return None
    (store,) = plan.after
    return store


def _some(*tickets: tuple[Link, int]) -> Tickets:
    return tuple((link, ticket) for link, ticket in tickets if ticket)


def _all(link: Link, tickets: Sequence[int]) -> Tickets:
    return tuple((link, ticket) for ticket in tickets)
