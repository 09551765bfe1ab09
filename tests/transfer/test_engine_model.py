"""`CopyEngine` carries out the plans of a real tier on streams that run beside each other.

Its queues are the real ones on the streams of a `FakeCuda`, whose work is done in random order as
far as the engine's waits allow, and a copy is enqueued slice by slice when nobody waits for it. A
wait that is missing shows as bytes that are wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from tier.rank_model import Rank, Step
from tier.tier_machine import TierMachine
from tier.tier_traffic import Traffic
from transfer.fake_cuda import FakeCuda, FakeStream

from kvoffload_patch.links import LOAD, STORE
from kvoffload_patch.transfer.backends.base import Slices, Streams
from kvoffload_patch.transfer.engine import CopyEngine
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.queue import CopyQueue

Ids = Sequence[int]
# Content by block, and the stream on which it is read or written.
End = tuple[dict[int, Any], FakeStream]


class EngineRank(Rank):
    """A rank whose plans go through a `CopyEngine`; it is its own backend, block by block."""

    name = "model"
    groups = ()

    def __init__(self) -> None:
        super().__init__()
        self.cuda = FakeCuda()
        self.chance = self.cuda.random.random
        lock = threading.RLock()
        with self.cuda:
            self.engine = CopyEngine(BlockLayout([torch.zeros(2, 1)], 2), self)
            self.loads = CopyQueue(self.cuda, lock, ends_on_bus=False, slices_ahead=2)
            self.stores = CopyQueue(self.cuda, lock, ends_on_bus=True, slices_ahead=2)
        for link, queue in ((LOAD, self.loads), (STORE, self.stores)):
            self.engine._links[link].queue = queue

    @property
    def idle(self) -> bool:
        queued = self.loads.queued or self.stores.queued
        return not self.steps and not queued and self.cuda.idle

    def submit(self) -> None:
        step = self.steps.popleft()
        with self.cuda:
            self.engine.begin_step(step.plan)
            self._read(step)
            self._write(step)
            self.engine.end_step()

    def run(self, favourite: int) -> bool:
        mine = [[0], [1, 2], [3, 4]][favourite]  # compute, loads, stores
        queues = [self.loads, self.stores]
        self.cuda.random.shuffle(queues)
        with self.cuda:
            went_on = self.chance() < 0.2 and any(queue.advance() for queue in queues)
            went_on = went_on or self.cuda.run_one(self.cuda.random.choice(mine))
            went_on = went_on or any(queue.advance() for queue in queues)
            done = self.engine.poll()
            self.loads_done, self.stores_done = done.done_on(LOAD), done.done_on(STORE)
        return went_on

    def _read(self, step: Step) -> None:
        def read(block: int, expected: Any) -> None:
            found = self.gpu.get(block)
            assert found == expected, f"GPU block {block}: {found} where {expected} was loaded"

        for block, content in step.reads.items():
            self.cuda.current.append(lambda b=block, c=content: read(b, c))

    def _write(self, step: Step) -> None:
        for block, content in step.writes.items():
            self.cuda.current.append(lambda b=block, c=content: self.gpu.update({b: c}))

    def load(
        self, gpu_block_ids: Ids, cpu_slots: Ids, streams: Streams | None = None, _: bool = False
    ) -> Slices:
        """Through staging memory, as the staged backend does."""
        assert streams is not None
        ends = (self.slots, streams.bus), (self.gpu, streams.blocks)
        return self._copy(cpu_slots, gpu_block_ids, *ends)

    def store(self, gpu_block_ids: Ids, cpu_slots: Ids, streams: Streams | None = None) -> Slices:
        assert streams is not None
        ends = (self.gpu, streams.blocks), (self.slots, streams.bus)
        return self._copy(gpu_block_ids, cpu_slots, *ends)

    def _copy(self, source_ids: Ids, target_ids: Ids, source: End, target: End) -> Slices:
        pairs, size = list(zip(source_ids, target_ids)), self.cuda.random.choice([1, 2, 9])
        for at in range(0, len(pairs), size):
            self._move(pairs[at : at + size], *source, *target)
            yield 0

    @staticmethod
    def _move(
        pairs: list[tuple[int, int]],
        source: dict[int, Any], first: FakeStream, target: dict[int, Any], second: FakeStream,
    ) -> None:  # fmt: skip
        staged: dict[int, Any] = {}
        for block, into in pairs:
            first.append(lambda b=block, t=into: staged.update({t: source.get(b)}))
        second.wait_stream(first)
        for _, into in pairs:
            second.append(lambda t=into: target.update({t: staged[t]}))


class EngineMachine(TierMachine):
    """The tier's random steps, with engines on the ranks."""

    new_rank = EngineRank


EngineMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestEngine = EngineMachine.TestCase


@pytest.mark.parametrize("seed", range(15))
def test_heavy_traffic_loads_what_was_stored(seed: int) -> None:
    Traffic(EngineMachine(), seed).run(steps=300)
