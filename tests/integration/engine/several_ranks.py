"""Several modelled ranks behind one scheduler: who is ahead, and what the engine hears of them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from integration.engine.agreement import Agreement
from integration.engine.mini import SLOT_BYTES, Mini
from integration.engine.modelled_rank import WRONG, Rank, Shape, Step

from kvoffload_patch import __version__
from kvoffload_patch.integration.engine.ranks.workers import RankGroup
from kvoffload_patch.integration.protocol import RESULT, RankGeometry, attached
from kvoffload_patch.integration.worker import rpc
from kvoffload_patch.plan import TransferResult
from kvoffload_patch.transfer import engine as copy_engine


class Died(BaseException):
    """The process of a rank has ended, which vLLM notices."""


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
        self.hashed, self._windows = executor.reporting.hashed, executor.reporting._windows
        self.slots: list[Any] = []

    def drain(self) -> None:
        self._group.drain()

    def scramble(self, blocks: bool = True, slots: bool = True) -> None:
        assert blocks and slots
        for rank in self._executor.ranks:
            rank.runner.kv_caches[0][:] = WRONG
            if (tier := attached(rank.runner)) is not None:
                tier._host.slots[:] = WRONG

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
        self._agreement, self._settled = Agreement(self), False

    def settle(self) -> None:
        """As `Mini.settle`, which takes copies that have failed for done: slots are not right."""
        self._settled = True
        super().settle()

    def _attach(self, *args: Any) -> None:
        self._usable, self._grows = self._group.num_usable, int(self._group.growing)
        super()._attach(*args)

    def begin_step(self) -> Any:
        """Schedule a step and send it to every rank."""
        self.time += self.step_ms / 1000
        scheduled = self.scheduler.schedule(**self.how)
        self._agreement.check_blocks()
        for new in scheduled.scheduled_new_reqs:
            self.hits.setdefault(new.req_id, new.num_computed_tokens)
        step = Step(
            scheduled, {name: self._tokens(name) for name in scheduled.num_scheduled_tokens}
        )
        for rank in self.executor.ranks:
            rank.sent.append(step)
        self._agreement.meet()
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
        self._check_sampled(step)
        self._check_slots()
        if not self._settled:
            self._agreement.check()
        if not self.breaker.detached and self._rng.random() < 0.05:
            self.tier.on_result(self._rng.choice(self._results))  # once more, or too late

    def _check_sampled(self, step: Step) -> None:
        first, *others = step.sampled.values()
        assert len(others) == len(self.executor.ranks) - 1
        assert others == [first] * len(others), "a rank has computed upon wrong bytes"

    @property
    def compared(self) -> int:
        """Readable slots whose bytes were looked at, over all ranks and steps."""
        return self._agreement.compared

    @property
    def compared_blocks(self) -> int:
        """Blocks of the GPU's prefix cache, likewise."""
        return self._agreement.compared_blocks

    def _check_slots(self) -> None:
        """The tier uses no slot that some rank lacks."""
        ready = [rank.memory.num_ready for rank in self.executor.ranks if rank.memory is not None]
        assert self.manager.num_slots <= min(ready, default=self.manager.num_slots)


@contextmanager
def opened(
    shape: Shape, num_slots: int, blocks: int, windows: Any, rng: random.Random,
    rates: dict[str, float], failing: int | None = None, kind: type[Rank] = Rank,
) -> Iterator[tuple[Executor, RankGroup]]:  # fmt: skip
    """Ranks with a tier each, closed at the end; ``failing``: the one whose copies fail, or all."""
    none = dict.fromkeys(rates, 0.0)
    ranks = [
        kind(n, blocks, windows, shape, rng, rates if failing in (None, n) else none)
        for n in range(shape.ranks)
    ]
    executor = Executor(ranks, shape, rng)
    group = RankGroup(executor, _die)
    late = mock.patch.object(copy_engine, "SyncCopyQueue", kind.queue)
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
