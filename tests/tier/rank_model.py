"""A rank that carries out plans on made-up bytes, as late as the plan allows.

It follows `kvoffload_patch.plan` to the letter and no further: three queues (compute, loads,
stores) that run beside each other, block by block and in any order that the waits allow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvoffload_patch.links import LOAD, STORE
from kvoffload_patch.plan import Transfer, TransferPlan


@dataclass
class Step:
    """What a step does to the GPU blocks, besides its plan.

    Attributes:
        reads: GPU block -> content that the forward pass must find there.
        writes: GPU block -> content that the forward pass puts there.
        stored: content that each block of the plan's store must have.
    """

    plan: TransferPlan | None
    reads: dict[int, Any] = field(default_factory=dict)
    writes: dict[int, Any] = field(default_factory=dict)
    stored: tuple[Any, ...] = ()


@dataclass
class _Wait:
    until: Callable[[], bool]


class Rank:
    """GPU blocks and CPU slots as dicts of content, and what is still to be done to them."""

    def __init__(self) -> None:
        self.gpu: dict[int, Any] = {}
        self.slots: dict[int, Any] = {}
        self.loads_done = self.stores_done = 0
        self.steps: deque[Step] = deque()
        self._computed = self._to_compute = 0
        self._queues: tuple[deque[Any], deque[Any], deque[Any]] = (deque(), deque(), deque())

    @property
    def idle(self) -> bool:
        """Nothing is left to do."""
        return not self.steps and not any(self._queues)

    def submit(self) -> None:
        """Put the next step's work on the queues, in the order and with the waits it asks for."""
        compute, loads, stores = self._queues
        step = self.steps.popleft()
        plan = step.plan or TransferPlan()
        compute.append(_Wait(lambda: self.stores_done >= plan.waits_for(STORE)))
        self._mark_compute()
        if plan.before:
            loads.append(self._after_compute())
            loads.append(_Wait(lambda: self.stores_done >= plan.known_done(STORE)))
        for load in plan.before:
            assert (load.source, load.target) == LOAD
            self._submit_load(load)
        compute.append(_Wait(lambda: self.loads_done >= plan.waits_for(LOAD)))
        self._forward(step)
        self._mark_compute()
        if plan.after:
            (store,) = plan.after
            assert (store.source, store.target) == STORE
            stores.append(self._after_compute())
            stores.append(_Wait(lambda: self.loads_done >= plan.known_done(LOAD)))
            self._submit_store(store, step.stored)

    def run(self, favourite: int) -> bool:
        """Do one piece of work, of this queue if it can go on; False if none of them can."""
        for i in range(3):
            queue = self._queues[(favourite + i) % 3]
            if self._can_go_on(queue):
                queue.popleft()()
                return True
        assert not any(self._queues), "the queues wait for each other"
        return False

    def finish(self, favourite: int = 0, eager: bool = True) -> None:
        """Carry out everything that was planned; ``eager``: after all of it was submitted."""
        while not self.idle:
            if self.steps and (eager or not self.run(favourite)):
                self.submit()
            elif not self.steps:
                self.run(favourite)

    def _can_go_on(self, queue: deque[Any]) -> bool:
        while queue and isinstance(queue[0], _Wait):
            if not queue[0].until():
                return False
            queue.popleft()
        return bool(queue)

    def _mark_compute(self) -> None:
        def mark() -> None:
            self._computed += 1

        self._to_compute += 1
        self._queues[0].append(mark)

    def _after_compute(self) -> _Wait:
        position = self._to_compute
        return _Wait(lambda: self._computed >= position)

    def _forward(self, step: Step) -> None:
        def read(block: int, expected: Any) -> None:
            found = self.gpu.get(block)
            assert found == expected, f"GPU block {block}: {found} where {expected} was loaded"

        def write(block: int, content: Any) -> None:
            self.gpu[block] = content

        for block, content in step.reads.items():
            self._queues[0].append(lambda b=block, c=content: read(b, c))
        for block, content in step.writes.items():
            self._queues[0].append(lambda b=block, c=content: write(b, c))

    def _submit_load(self, load: Transfer) -> None:
        def copy(block: int, slot: int) -> None:
            self.gpu[block] = self.slots.get(slot)

        def done() -> None:
            assert self.loads_done == load.ticket - 1, "a load ticket is missing or came twice"
            self.loads_done = load.ticket

        for slot, block in zip(load.source_ids, load.target_ids):
            self._queues[1].append(lambda b=block, s=slot: copy(b, s))
        self._queues[1].append(done)

    def _submit_store(self, store: Transfer, stored: tuple[Any, ...]) -> None:
        def copy(block: int, slot: int, expected: Any) -> None:
            found = self.gpu.get(block)
            assert found == expected, f"GPU block {block}: {found} stored as {expected}"
            self.slots[slot] = found

        def done() -> None:
            assert self.stores_done == store.ticket - 1, "a store ticket is missing or came twice"
            self.stores_done = store.ticket

        for block, slot, content in zip(store.source_ids, store.target_ids, stored):
            self._queues[2].append(lambda b=block, s=slot, c=content: copy(b, s, c))
        self._queues[2].append(done)
