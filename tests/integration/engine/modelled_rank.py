"""A rank of several: the package's own worker, over KV tensors of the arithmetic model.

It carries out the steps that it is sent in their order, however far behind others it is. It opens
the tier as in a worker, with the board and the slots in common where ranks share memory. Copies are
made as late as its waits allow. What is modelled is the forward pass, how fast CPU memory becomes
usable, and which copies fail.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from engine.late_copies import LateQueue
from scheduler_half import parts
from scheduler_half.device import BLOCK, Device

from kvoffload_patch.integration.protocol import PLAN, attached
from kvoffload_patch.links import CPU
from kvoffload_patch.transfer.errors import NoSlots

_APART = 1 << 52  # between the values of one token on two ranks
WRONG = 7


@dataclass(frozen=True)
class Shape:
    """How many ranks there are, and what they share.

    Attributes:
        parts, stages: tensor-parallel ranks of a pipeline stage, and stages.
        alike: the ranks of a stage hold the same bytes, as with MLA.
        board: the ranks share memory.
        integrity: which loads are compared with checksums.
        grows: CPU memory becomes usable while the engine serves; 2: and on some rank not all.
    """

    parts: int
    stages: int = 1
    alike: bool = False
    board: bool = True
    integrity: str = "off"
    grows: int = 0

    @property
    def ranks(self) -> int:
        return self.parts * self.stages


@dataclass
class Step:
    """What ranks are sent, and what each of them has sampled."""

    scheduled: Any
    tokens: dict[str, list[int]]
    sampled: dict[int, list[list[int]]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)

    def tokens_of(self, name: str) -> list[int]:
        """Of a request, when the step was scheduled."""
        return list(self.tokens[name])

    @property
    def plan(self) -> Any:
        return getattr(self.scheduled, PLAN, None)


class _Block:
    """A GPU block, as a list of the values that `Device` knows."""

    def __init__(self, row: torch.Tensor, apart: int) -> None:
        self._row, self._apart = row, apart

    def __len__(self) -> int:
        return len(self._row)

    def __getitem__(self, at: slice) -> list[int]:
        return [value - self._apart for value in self._row[at].tolist()]

    def __setitem__(self, at: int | slice, value: Any) -> None:
        more = torch.tensor(value, dtype=torch.int64)
        self._row[at] = more + self._apart


class _Blocks:
    """The KV tensor of a rank, in the place of `Device.kv`."""

    def __init__(self, tensor: torch.Tensor, apart: int) -> None:
        self._tensor, self._apart = tensor, apart

    def __len__(self) -> int:
        return len(self._tensor)

    def __getitem__(self, block: int) -> _Block:
        return _Block(self._tensor[block, 0], self._apart)

    def __setitem__(self, block: int, values: list[int]) -> None:
        self[block][:] = values

    def __iter__(self) -> Iterator[_Block]:
        return map(self.__getitem__, range(len(self)))


class _Memory:
    """A rank's slots, of which more become usable with each step.

    Args:
        host: all of them.
        each: slots that a step adds.
        most: growth ends there.
    """

    def __init__(self, host: Any, each: int, most: int) -> None:
        self._host, self._each, self._most = host, each, most
        self._wanted = host.num_slots
        self.num_ready = min(each, most)
        self.waited = 0  # for slots that another rank had before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    @property
    def growing(self) -> bool:
        return self.num_ready < min(self._wanted, self._most)

    @property
    def growth_ended(self) -> str:
        return "" if self._most >= self._wanted else f"no more than {self._most} slots"

    def step_ends(self) -> None:
        if self.growing:
            self.num_ready = min(self._wanted, self._most, self.num_ready + self._each)

    def wait_ready(self, num_slots: int) -> None:
        self.waited += num_slots > self.num_ready
        if num_slots > self.wait_up_to(num_slots):
            raise NoSlots(f"expected {num_slots} slots, found {self.num_ready}")

    def wait_up_to(self, num_slots: int) -> int:
        self.num_ready = max(self.num_ready, min(num_slots, self._wanted, self._most))
        return self.num_ready

    def resize(self, num_slots: int) -> None:
        self._wanted = num_slots
        self.num_ready = min(self.num_ready, num_slots)
        self._host.resize(num_slots)


class Rank(Device):
    """One worker: the device computes, and `RankTier` copies.

    Args:
        number: of the rank.
        blocks: GPU blocks.
        windows: as `Device` has them.
        shape: of the engine.
        rng: says which copies fail.
        rates: how many of each direction do.

    Attributes:
        queue: of the copies of each link.
        apart: between the values of a token in this rank's blocks and in `Device`'s.
    """

    queue: type[LateQueue] = LateQueue

    def __init__(
        self, number: int, blocks: int, windows: Any, shape: Shape, rng: random.Random,
        rates: dict[str, float],
    ) -> None:  # fmt: skip
        super().__init__(blocks, 1, windows, 0, lambda *_: False)
        self.number, self.shape, self._rng, self._rates = number, shape, rng, rates
        self.apart = _APART * (1 + (number // shape.parts if shape.alike else number))
        tensor = torch.zeros(blocks, 1, BLOCK, dtype=torch.int64)
        self.kv: Any = _Blocks(tensor, self.apart)
        sizes = {"tensor_parallel_size": shape.parts, "pipeline_parallel_size": shape.stages}
        self.runner = SimpleNamespace(
            kv_caches=[tensor], device=torch.device("cpu"),
            kv_cache_config=SimpleNamespace(
                num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[]
            ),
            vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(**sizes)),
        )  # fmt: skip
        self.vllm_config = self.runner.vllm_config
        self.rank, self.model_runner = number, self.runner
        self.sent = deque[Step]()
        self._begun: Step | None = None
        self.steps = self.corrupted = 0
        self.flipped = set[int]()  # slots that hold something else than was stored
        self.failed = {"load": 0, "store": 0}  # copies
        self.memory: _Memory | None = None

    def opened(self, memory: tuple[int, int] | None, patience: int, corrupts: bool) -> None:
        """The tier is there: copies may be late and fail, and memory may come later."""
        tier, self._corrupts = attached(self.runner), corrupts
        for link in tier._engine._all:
            link.queue.patience = patience
            link._copy = self._failing(link.link[1] == CPU, link._copy)
        if memory is None:
            return
        self.memory = tier._host = _Memory(tier._host, *memory)
        tier._growth_told = False
        for link in tier._engine._all:
            if link._wait_ready is not None:
                link._wait_ready = tier._host.wait_ready

    def _failing(self, is_store: bool, as_made: Any) -> Any:
        name = "store" if is_store else "load"

        def copy(source_ids: Any, target_ids: Any, streams: Any, compared: bool) -> Any:
            if self._rng.random() < self._rates[name]:
                self.failed[name] += 1
                if is_store:
                    attached(self.runner)._host.slots[list(target_ids)] = WRONG
                else:
                    self.runner.kv_caches[0][list(target_ids)] = WRONG
                raise OSError("no such device")
            verdict = yield from as_made(source_ids, target_ids, streams, compared) or ()
            if is_store:
                self.flipped.difference_update(target_ids)
            if is_store and self._corrupts and self._rng.random() < 0.1:
                self.corrupted += 1
                self.flipped.add(target_ids[0])
                attached(self.runner)._host.slots[target_ids[0], 0] ^= 1
            return verdict

        return copy

    # Steps

    def begin(self) -> None:
        """The next step up to its forward pass, which it has done then."""
        step, self._begun = self.sent[0], self.sent[0]
        if (tier := attached(self.runner)) is not None:
            tier.begin_step(step.plan, step.scheduled)
        names, sampled = self.compute(step.scheduled, step.tokens_of)
        # A copy: vLLM takes away what comes behind a stop.
        step.sampled[self.number], step.outputs[self.number] = [list(s) for s in sampled], names
        self._sampled = sampled
        if tier is not None:
            tier.end_forward()

    def end(self) -> None:
        """The rest of that step."""
        step = self.sent.popleft()
        output = parts.make_output(step.outputs[self.number], self._sampled)
        if (tier := attached(self.runner)) is not None:
            output = tier.end_step(output)
        step.outputs[self.number], self._begun = output, None
        self.steps += 1

    @property
    def has_begun(self) -> bool:
        """Whether it is within a step."""
        return self._begun is not None

    def steps_begun(self) -> int:
        """How many, since the start."""
        return self.steps + self.has_begun
