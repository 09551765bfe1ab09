"""`CopyEngine` carries out the plans of a real tier on streams that run beside each other.

The streams are queues whose work is done in random order as far as the engine's waits allow, so
that a wait that is missing shows as bytes that are wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import settings
from tier.rank_model import Rank, _Wait
from tier.tier_machine import TierMachine, Traffic

from kvoffload_patch.transfer.copy_engine import CopyEngine
from kvoffload_patch.transfer.layout import BlockLayout


class QueueLane:
    """`Lane` on one of a rank's queues."""

    def __init__(self, rank: EngineRank, stream: deque[Any]) -> None:
        self.rank = rank
        self.stream = stream
        self.done = 0

    def follow_compute(self) -> None:
        self.rank._mark_compute()
        self.stream.append(self.rank._after_compute())

    def submit(self, ticket: int, copy: Callable[[], None]) -> None:
        def done() -> None:
            self.done = ticket

        self.rank.copying = self.stream
        copy()
        self.stream.append(done)

    def hold(self, stream: deque[Any] | None, ticket: int) -> None:
        waiter = self.rank._queues[0] if stream is None else stream
        waiter.append(_Wait(lambda: self.done >= ticket))

    def poll(self) -> int:
        return self.done


class EngineRank(Rank):
    """A rank whose plans go through a `CopyEngine`; it is its own backend, block by block."""

    def __init__(self) -> None:
        super().__init__()
        layout = BlockLayout([torch.zeros(2, 1)], 2)
        self.copying: deque[Any] = deque()
        self.engine = CopyEngine(layout, self)
        self.lanes = [QueueLane(self, queue) for queue in self._queues[1:]]
        self.engine._loads, self.engine._stores = cast("list[Any]", self.lanes)

    def submit(self) -> None:
        step = self.steps.popleft()
        self.engine.begin_step(step.plan)
        self._forward(step)
        self.engine.end_step()

    def run(self, favourite: int) -> bool:
        went_on = super().run(favourite)
        self.loads_done, self.stores_done = self.engine.poll()
        return went_on

    def load(self, gpu_block_ids: Sequence[int], cpu_slots: Sequence[int]) -> None:
        def copy(block: int, slot: int) -> None:
            self.gpu[block] = self.slots.get(slot)

        for block, slot in zip(gpu_block_ids, cpu_slots):
            self.copying.append(lambda b=block, s=slot: copy(b, s))

    def store(self, gpu_block_ids: Sequence[int], cpu_slots: Sequence[int]) -> None:
        def copy(block: int, slot: int) -> None:
            self.slots[slot] = self.gpu.get(block)

        for block, slot in zip(gpu_block_ids, cpu_slots):
            self.copying.append(lambda b=block, s=slot: copy(b, s))


class EngineMachine(TierMachine):
    """The tier's random steps, with engines on the ranks."""

    new_rank = EngineRank


EngineMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestEngine = EngineMachine.TestCase


@pytest.mark.parametrize("seed", range(15))
def test_heavy_traffic_loads_what_was_stored(seed: int) -> None:
    Traffic(EngineMachine(), seed).run(steps=300)
