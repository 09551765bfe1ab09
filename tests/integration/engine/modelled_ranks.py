"""Several ranks of one engine: the package's own workers, over KV tensors of the arithmetic model.

Each rank carries out the steps that it is sent in their order, and how far it is behind others is
random. It opens the tier as in a worker, with the board and the slots in common where ranks share
memory. Copies are made as late as each rank's waits allow. What is modelled is the forward pass,
how fast CPU memory becomes usable, and which copies fail.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from engine.late_copies import LateQueue
from integration.engine.mini import SLOT_BYTES, Mini
from scheduler_half import parts
from scheduler_half.device import BLOCK, Device

from kvoffload_patch import __version__
from kvoffload_patch.integration.engine.ranks.workers import RankGroup
from kvoffload_patch.integration.protocol import PLAN, RESULT, RankGeometry, attached
from kvoffload_patch.integration.worker import rpc
from kvoffload_patch.links import CPU
from kvoffload_patch.plan import TransferResult
from kvoffload_patch.transfer import engine as copy_engine
from kvoffload_patch.transfer.errors import NoSlots

_APART = 1 << 52  # between the values of one token on two ranks
_WRONG = 7


class Died(BaseException):
    """The process of a rank has ended, which vLLM notices."""


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
    """

    def __init__(
        self, number: int, blocks: int, windows: Any, shape: Shape, rng: random.Random,
        rates: dict[str, float],
    ) -> None:  # fmt: skip
        super().__init__(blocks, 1, windows, 0, lambda *_: False)
        self.number, self._rng, self._rates = number, rng, rates
        apart = number // shape.parts if shape.alike else number
        tensor = torch.zeros(blocks, 1, BLOCK, dtype=torch.int64)
        self.kv: Any = _Blocks(tensor, _APART * (1 + apart))
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
                    attached(self.runner)._host.slots[list(target_ids)] = _WRONG
                else:
                    self.runner.kv_caches[0][list(target_ids)] = _WRONG
                raise OSError("no such device")
            verdict = yield from as_made(source_ids, target_ids, streams, compared) or ()
            if is_store and self._corrupts and self._rng.random() < 0.1:
                self.corrupted += 1
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


class Executor:
    """Of these ranks; the engine gets the result of one.

    Args:
        ranks: in the order of their numbers.
        shape: of the engine.
        rng: says who is ahead.
    """

    driver_worker = None  # a rank's process is not ended, but by what `RankGroup` is given

    def __init__(self, ranks: list[Rank], shape: Shape, rng: random.Random) -> None:
        self.ranks, self._shape, self._rng = ranks, shape, rng
        self.reporting = ranks[shape.ranks - shape.parts]
        self._speeds = [rng.choice([1, 1, 5, 20]) for _ in ranks]
        self.calls = 0

    def collective_rpc(self, function: Any, timeout: float, args: tuple[Any, ...]) -> Any:
        """Each rank answers when it has come to the end of what it was sent before."""
        self.calls += 1
        if function.__name__ == "describe_rank":
            return [(True, self._describe(rank)) for rank in self.ranks]
        if function.__name__ == "can_share":
            return [(True, (self._shape.board, True))] * len(self.ranks)
        answers, order = dict[int, Any](), list(self.ranks)
        self._rng.shuffle(order)
        for rank in order:
            while rank.sent:
                self.go_on(rank)
            answers[rank.number] = function(rank, *args)
        return [answers[rank.number] for rank in self.ranks]

    def _describe(self, rank: Rank) -> RankGeometry:
        shape = self._shape
        counted = shape.stages if shape.alike and self._has_slots_in_common else shape.ranks
        stage = f"stage {rank.number // shape.parts}" if shape.alike else ""
        size = SLOT_BYTES // counted
        room = {"available_bytes": 1 << 50, "shareable_bytes": 1 << 50}
        return RankGeometry(
            rank.number, "a", rank.number, size, size, len(rank.kv), "cuda", **room,
            same_bytes=stage, of_ranks=shape.ranks, version=__version__,
        )  # fmt: skip

    @property
    def _has_slots_in_common(self) -> bool:
        return self._shape.board and self._shape.integrity != "full"

    def go_on(self, rank: Rank) -> None:
        """A piece of a step; the one that reports ends it behind the forward pass of all."""
        if not rank.has_begun:
            rank.begin()
            return
        if rank is self.reporting:
            for other in self.ranks:
                while other.steps_begun() <= rank.steps:
                    self.go_on(other)
        rank.end()

    def work(self, pieces: int) -> None:
        """Some ranks go on, some further than others."""
        for _ in range(pieces):
            [rank] = self._rng.choices(self.ranks, self._speeds)
            if rank.sent:
                self.go_on(rank)

    def carry_out(self, step: Step) -> Any:
        """The output of a step, from the rank that reports."""
        while step in self.reporting.sent:
            self.work(1)
        return step.outputs[self.reporting.number]


class Ranks:
    """All of them, in the place of `Mini.device`."""

    def __init__(self, executor: Executor, group: RankGroup) -> None:
        self._executor, self._group = executor, group
        self.hashed = executor.reporting.hashed
        self.slots: list[Any] = []

    def drain(self) -> None:
        self._group.drain()

    def scramble(self, blocks: bool = True, slots: bool = True) -> None:
        assert blocks and slots
        for rank in self._executor.ranks:
            rank.runner.kv_caches[0][:] = _WRONG
            if (tier := attached(rank.runner)) is not None:
                tier._host.slots[:] = _WRONG

    def tell_drafts(self, *_: Any) -> None:
        """There are none."""


class RanksMini(Mini):
    """`Mini` over several ranks; the arguments are those of `Mini`, but for its device."""

    def __init__(
        self, executor: Executor, group: RankGroup, rng: random.Random, **about: Any
    ) -> None:
        self._rng, self._results = rng, deque[TransferResult](maxlen=8)
        self._group = group
        super().__init__(ranks=group, **about)  # type: ignore[arg-type]
        self.device = Ranks(executor, group)  # type: ignore[assignment]
        self.executor = executor

    def _attach(self, *args: Any) -> None:
        self._usable, self._grows = self._group.num_usable, int(self._group.growing)
        super()._attach(*args)

    def begin_step(self) -> Any:
        """Schedule a step and send it to every rank."""
        self.time += self.step_ms / 1000
        scheduled = self.scheduler.schedule(**self.how)
        for new in scheduled.scheduled_new_reqs:
            self.hits.setdefault(new.req_id, new.num_computed_tokens)
        step = Step(
            scheduled, {name: self._tokens(name) for name in scheduled.num_scheduled_tokens}
        )
        for rank in self.executor.ranks:
            rank.sent.append(step)
        self.queue.appendleft((scheduled, step))
        self.executor.work(self._rng.choice([0, 1, 3, 10]))
        return scheduled

    def end_step(self) -> None:
        """Take in the oldest output; every rank has sampled the same in its step."""
        scheduled, step = self.queue[-1]
        output = self.executor.carry_out(step)
        self.queue[-1] = scheduled, output
        self._results.append(getattr(output, RESULT, TransferResult()))
        super().end_step()
        first, *others = step.sampled.values()
        assert len(others) == len(self.executor.ranks) - 1
        assert others == [first] * len(others), "a rank has computed upon wrong bytes"
        self._check_slots()
        if not self.breaker.detached and self._rng.random() < 0.05:
            self.tier.on_result(self._rng.choice(self._results))  # once more, or too late

    def _check_slots(self) -> None:
        """The tier uses no slot that some rank lacks."""
        ready = [rank.memory.num_ready for rank in self.executor.ranks if rank.memory is not None]
        assert self.manager.num_slots <= min(ready, default=self.manager.num_slots)


@contextmanager
def opened(
    shape: Shape, num_slots: int, blocks: int, windows: Any, rng: random.Random,
    rates: dict[str, float], failing: int | None = None,
) -> Iterator[tuple[Executor, RankGroup]]:  # fmt: skip
    """Ranks with a tier each, closed at the end; ``failing``: the one whose copies fail, or all."""
    none = dict.fromkeys(rates, 0.0)
    ranks = [
        Rank(n, blocks, windows, shape, rng, rates if failing in (None, n) else none)
        for n in range(shape.ranks)
    ]
    executor = Executor(ranks, shape, rng)
    group = RankGroup(executor, _die)
    late = mock.patch.object(copy_engine, "SyncCopyQueue", LateQueue)
    try:
        with late:
            group.open(num_slots * SLOT_BYTES, integrity=shape.integrity)
        assert group.num_slots == num_slots
        slowest = rng.randrange(shape.ranks)
        for rank in ranks:
            memory = None
            if shape.grows:
                most = rng.randint(1, num_slots) if shape.grows > 1 and rng.random() < 0.5 else 0
                each = 1 if rank.number == slowest else rng.choice([1, 2, 7, num_slots])
                memory = each, most or num_slots
            rank.opened(memory, rng.randrange(4), shape.integrity == "full")
        if shape.grows:
            _growing(group, executor, shape)
        group.load_ms_per_block = rng.choice([0.1, 1.0, 15.0])
        yield executor, group
    finally:
        for rank in ranks:
            rpc.close_rank(rank)


def _growing(group: RankGroup, executor: Executor, shape: Shape) -> None:
    """As `RankGroup.open` has found it, and as ranks are without a board: grown."""
    tiers = [attached(rank.runner) for rank in executor.ranks]
    for tier in tiers:
        if not shape.board:
            tier._host.wait_up_to(group.num_slots)
        if tier._tells_slots:
            tier._usable = tier.num_ready, True
    group.num_usable = min(tier.num_ready for tier in tiers)
    group.growing = any(tier.growing for tier in tiers)


def _die() -> None:
    raise Died
