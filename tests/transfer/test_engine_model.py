"""`CopyEngine` carries out the plans of a real tier on streams that run beside each other.

Its queues are the real ones on the streams of a `FakeCuda`, whose work is done in random order as
far as the engine's waits allow, and a copy is enqueued slice by slice when nobody waits for it. A
wait that is missing shows as bytes that are wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from tier.rank_model import Rank, Step
from tier.tier_machine import TierMachine, Traffic
from transfer.fake_cuda import FakeCuda, FakeEvent

from kvoffload_patch.links import LOAD, STORE
from kvoffload_patch.transfer.backends.base import Slices, Streams
from kvoffload_patch.transfer.engine import CopyEngine
from kvoffload_patch.transfer.layout import BlockLayout
from kvoffload_patch.transfer.queue import CopyQueue

Ids = Sequence[int]


class EngineRank(Rank):
    """A rank whose plans go through a `CopyEngine`; it is its own backend, block by block.

    A block has a part for each group of rows.
    """

    name = "model"
    groups = [(0, 1), (1, 2)]

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[dict[int, Any]] = [{}, {}]  # by group: GPU block -> content
        self.cuda = FakeCuda()
        self.chance = self.cuda.random.random
        lock = threading.RLock()
        with self.cuda:
            self.engine = CopyEngine(BlockLayout([torch.zeros(2, 1)], 2), self)
            self.engine._batches = True
            self.loads = CopyQueue(self.cuda, lock, ends_on_bus=False, slices_ahead=2)
            self.stores = CopyQueue(self.cuda, lock, ends_on_bus=True, slices_ahead=2)
        for link, queue in ((LOAD, self.loads), (STORE, self.stores)):
            self.engine._links[link].queue = queue
        batcher = self.engine._links[STORE].batcher
        assert batcher is not None
        self.batcher = batcher
        self.engine._arrived = [FakeEvent(self.cuda) for _ in self.groups]

    @property
    def idle(self) -> bool:
        queued = self.loads.queued or self.stores.queued or self.batcher.first
        return not self.steps and not queued and self.cuda.idle

    def submit(self) -> None:
        step = self.steps.popleft()
        plan = step.plan
        due = plan is not None and any(t.ticket <= plan.waits_for(LOAD) for t in plan.before)
        by_layer = due and self.chance() < 0.5
        with self.cuda:
            self.engine.begin_step(plan, by_layer)
            for group, part in enumerate(self.parts):
                if by_layer:
                    self.engine.wait_group(group)
                self._read(step, part)
            if by_layer and self.chance() < 0.5:  # nothing more is read otherwise
                self.engine.wait_all_loads()
            for part in self.parts:
                self._write(step, part)
            self.engine.end_step(batch_stores=self.chance() < 0.7)

    def run(self, favourite: int) -> bool:
        mine = [[0], [1, 2], [3, 4]][favourite]  # compute, loads, stores
        queues = [self.loads, self.stores]
        self.cuda.random.shuffle(queues)
        with self.cuda:
            went_on = self.chance() < 0.2 and any(queue.advance() for queue in queues)
            went_on = went_on or self.cuda.run_one(self.cuda.random.choice(mine))
            went_on = went_on or any(queue.advance() for queue in queues)
            if not went_on and self.batcher.first:
                self.engine.end_step()  # of a step that stores nothing
                went_on = True
            done = self.engine.poll()
            self.loads_done, self.stores_done = done.done_on(LOAD), done.done_on(STORE)
        return went_on

    def _read(self, step: Step, part: dict[int, Any]) -> None:
        def read(block: int, expected: Any) -> None:
            found = part.get(block)
            assert found == expected, f"GPU block {block}: {found} where {expected} was loaded"

        for block, content in step.reads.items():
            self.cuda.current.append(lambda b=block, c=content: read(b, c))

    def _write(self, step: Step, part: dict[int, Any]) -> None:
        for block, content in step.writes.items():
            self.cuda.current.append(lambda b=block, c=content: part.update({b: c}))

    def load(
        self, gpu_block_ids: Ids, cpu_slots: Ids, streams: Streams | None = None,
        arrived: Callable[[int], None] | None = None,
    ) -> Slices:  # fmt: skip
        """Through staging memory, as the staged backend does; the whole at once or by group."""
        assert streams is not None
        pairs = list(zip(gpu_block_ids, cpu_slots))
        for groups in [[0, 1]] if arrived is None else [[0], [1]]:
            for piece in self._pieces(pairs):
                self._move(piece, groups, streams.bus, streams.blocks, self._slot_to_block)
                yield
            if arrived is not None:
                arrived(groups[0])

    def store(
        self, gpu_block_ids: Sequence[int], cpu_slots: Sequence[int], streams: Streams | None = None
    ) -> Slices:
        assert streams is not None
        for piece in self._pieces(list(zip(gpu_block_ids, cpu_slots))):
            self._move(piece, [0, 1], streams.blocks, streams.bus, self._block_to_slot)
            yield

    def _pieces(self, pairs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        size = self.cuda.random.choice([1, 2, 9])
        return [pairs[at : at + size] for at in range(0, len(pairs), size)]

    def _move(self, pairs: Any, groups: Any, first: Any, second: Any, ends: Any) -> None:
        staged: dict[Any, Any] = {}
        source, target = ends()
        for group in groups:
            for pair in pairs:
                first.append(lambda g=group, p=pair: staged.update({(g, p): source(g, *p)}))
        second.wait_stream(first)
        for group in groups:
            for pair in pairs:
                second.append(lambda g=group, p=pair: target(g, *p, staged[g, p]))

    def _slot_to_block(self) -> Any:
        def source(group: int, block: int, slot: int) -> Any:
            return self.slots.get(slot, ("nothing", "nothing"))[group]

        def target(group: int, block: int, slot: int, content: Any) -> None:
            self.parts[group][block] = content

        return source, target

    def _block_to_slot(self) -> Any:
        def source(group: int, block: int, slot: int) -> Any:
            return self.parts[group].get(block)

        def target(group: int, block: int, slot: int, content: Any) -> None:
            parts = list(self.slots.get(slot, ("nothing", "nothing")))
            parts[group] = content
            self.slots[slot] = tuple(parts)

        return source, target


class EngineMachine(TierMachine):
    """The tier's random steps, with engines on the ranks."""

    new_rank = EngineRank

    def slot_content(self, rank: Any, slot: int) -> Any:
        first, second = rank.slots[slot]
        assert first == second
        return first


EngineMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestEngine = EngineMachine.TestCase


@pytest.mark.parametrize("seed", range(15))
def test_heavy_traffic_loads_what_was_stored(seed: int) -> None:
    Traffic(EngineMachine(), seed).run(steps=300)
