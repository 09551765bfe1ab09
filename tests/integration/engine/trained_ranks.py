"""Ranks whose weights change, and a trainer that changes them.

Every KV value says with which weights it was computed, and what it was computed upon. A rank that
loads a value of other weights than it has now gets a wrong one in its place, so that no step can
read it unnoticed. What vLLM itself has of the weights before goes on to be read, as in an engine.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from integration.engine.modelled_rank import _APART, WRONG, Rank, Shape
from integration.engine.trainer import _all_paused, reset
from scheduler_half.device import BLOCK


class _Block:
    """A GPU block: values, and the weights of each behind them."""

    def __init__(self, row: torch.Tensor, kv: _Blocks) -> None:
        self._row, self._kv = row, kv

    def __len__(self) -> int:
        return BLOCK

    def __getitem__(self, at: slice) -> list[int]:
        self._kv.oldest = min(self._kv.oldest, int(self._row[BLOCK:][at].min()))
        return [value - self._kv.apart for value in self._row[:BLOCK][at].tolist()]

    def __setitem__(self, at: int | slice, value: Any) -> None:
        self._row[:BLOCK][at] = torch.tensor(value, dtype=torch.int64) + self._kv.apart
        self._row[BLOCK:][at] = self._kv.oldest


class _Blocks:
    """The KV tensor of a rank; ``oldest``: weights behind what a request has read in this step."""

    def __init__(self, tensor: torch.Tensor, apart: int) -> None:
        self._tensor, self.apart, self.oldest = tensor, apart, 0

    def __len__(self) -> int:
        return len(self._tensor)

    def __getitem__(self, block: int) -> _Block:
        return _Block(self._tensor[block, 0], self)

    def __setitem__(self, block: int, values: list[int]) -> None:
        self[block][:] = values

    def __iter__(self) -> Iterator[_Block]:
        return map(self.__getitem__, range(len(self)))


class TrainedRank(Rank):
    """A rank that can be sent something else than steps, in their order.

    Attributes:
        version: of its weights.
        stale: blocks of other weights that it has loaded.
    """

    def __init__(self, number: int, blocks: int, windows: Any, shape: Shape, *more: Any) -> None:
        super().__init__(number, blocks, windows, shape, *more)
        tensor = torch.zeros(blocks, 1, 2 * BLOCK, dtype=torch.int64)
        self.runner.kv_caches = [tensor]
        self.kv = _Blocks(tensor, self.kv._apart)
        assert self.kv.apart >= _APART
        self.model = torch.nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.runner.get_model = lambda: self.model
        self.stale, self.version = 0, 0
        self.use(0)

    def use(self, version: int) -> None:
        """Compute with these weights from now on."""
        self.version = version
        self.model.weight.fill_(version)

    def lose_blocks(self, blocks: Sequence[int] | None = None) -> None:
        """What these of the GPU's blocks held is gone; None: all of them, as in sleep."""
        self.runner.kv_caches[0][slice(None) if blocks is None else list(blocks)] = WRONG

    def begin(self) -> None:
        """The next step up to the end of its forward pass, or the whole of something else."""
        if callable(self.sent[0]):
            self.sent.popleft()()
        else:
            super().begin()

    def _sees_right(self, sequence: Any, end: int) -> bool:
        self.kv.oldest = self.version
        return super()._sees_right(sequence, end)

    def _failing(self, is_store: bool, as_made: Any) -> Any:
        made = super()._failing(is_store, as_made)

        def load(source_ids: Any, target_ids: Any, *more: Any) -> Any:
            verdict = yield from made(source_ids, target_ids, *more)
            kv, targets = self.runner.kv_caches[0], torch.tensor(list(target_ids))
            stale = (kv[targets, 0, BLOCK:] != self.version).any(dim=1)
            self.stale += int(stale.sum())
            kv[targets[stale]] = WRONG
            return verdict

        return made if is_store else load


class RanksTrainer:
    """Puts the engine to sleep and gives it other weights, of which ranks may hear late or not all.

    Args:
        mini: a `RanksMini` over `TrainedRank`.
        seed: of what it does.
        watched: whether the tier may keep blocks through sleep.

    Attributes:
        seen: how often it has done what.
    """

    def __init__(self, mini: Any, seed: int, watched: bool) -> None:
        self._mini, self._rng = mini, random.Random(f"trainer of ranks {seed}")
        self.seen, self._version = Counter[str](), 0
        self._often = self._rng.choice([0.03, 0.1, 0.3])
        self._ranks: Sequence[TrainedRank] = mini.executor.ranks
        self._step, mini.step = mini.step, self._step_and_update
        if watched:
            mini.tier.weights.watch()

    def _step_and_update(self) -> None:
        """Loads under way are seldom met by chance."""
        self._step()
        if not self._mini.breaker.detached and self._mini.tier._loads.arriving:
            self.seen["steps with loads under way"] += 1
            if self._rng.random() < 0.2:
                self._update()

    def disturb(self) -> None:
        """Perhaps do something, between two steps."""
        mini, rng = self._mini, self._rng
        if mini.breaker.detached:
            return
        if mini.tier.weights.mixed:
            assert not mini.manager._slot_of, "blocks of the weights before are in the tier"
            if rng.random() < 0.3 and self._take_in():
                self.seen["reset"] += reset(mini)
        if mini.breaker.detached or rng.random() > self._often:
            return
        if rng.random() < 0.3:
            self._update()
        elif self._take_in():
            self._sleep()

    def _take_in(self) -> bool:
        """What is under way comes to its end, as before a reset; whether vLLM then answers rightly.

        Releases that drop a token of each request that a reset preempts, as one that is under way,
        do so where none is any more.
        """
        from vllm.v1.request import Request

        drops = "discard_latest_async_tokens" in Request.__init__.__code__.co_names
        if self._mini.queue and drops and self._mini.config.scheduler_config.async_scheduling:
            return False
        while self._mini.queue:
            self._mini.end_step()
        return True

    def _update(self) -> None:
        """As `collective_rpc` does, whose hook tells the tier, whatever some ranks have raised."""
        self._version += 1
        some = self._some()
        self._send(self._ranks, "lose_blocks", self._unpublished())
        self._send([rank for rank in self._ranks if rank in some], "use", self._version)
        self._mini.breaker.weights_updated()
        if len(some) < len(self._ranks):  # the trainer is told, and tries again at once
            self.seen["updated in part"] += 1
            self._send(self._ranks, "use", self._version)
            self._mini.breaker.weights_updated()
        self.seen["updated"] += 1
        assert self._mini.breaker.detached or not self._mini.manager._slot_of

    def _unpublished(self) -> list[int]:
        """GPU blocks of loads under way that nothing may read but what they bring hereafter."""
        arriving = self._mini.tier._loads.arriving.values()
        found = [block.block_id for block in arriving if block.block_hash is None]
        self.seen["loads under way"] += len(found)
        return found

    def _some(self) -> Sequence[TrainedRank]:
        """All of them, or now and then only some."""
        if self._rng.random() < 0.7:
            return self._ranks
        return self._rng.sample(list(self._ranks), self._rng.randrange(len(self._ranks)))

    def _send(self, ranks: Sequence[TrainedRank], name: str, *args: Any) -> None:
        """A call of these, in the order of the steps; it may be waited for or not."""
        for rank in ranks:
            rank.sent.append(_Call(getattr(rank, name), args))
        if self._rng.random() < 0.5:
            for rank in self._rng.sample(list(ranks), len(ranks)):
                while rank.sent:
                    self._mini.executor.go_on(rank)
        else:
            self.seen["not waited for"] += 1

    def _sleep(self) -> None:
        mini, weights = self._mini, self._mini.tier.weights
        weights.sleep_begins(1)
        with _all_paused(mini.scheduler):
            emptied = reset(mini)
        weights.sleep_over()
        if not emptied:
            return
        mini.executor.is_sleeping = True
        self.seen["slept"] += 1
        self._send(self._ranks, "lose_blocks")
        kept = len(mini.manager._slot_of)
        what = self._rng.choice(["nothing", "nothing", "told", "untold"])
        if what == "told":
            self._update()
        elif what == "untold":  # on the models themselves, of which the tier hears nothing
            self._version += 1
            self._send(self._some() if not mini.executor._shape.alike else self._ranks,
                       "use", self._version)  # fmt: skip
        else:
            self.seen["kept"] += kept
        mini.executor.is_sleeping = False


class _Call:
    """Something that a rank is to do between two steps."""

    def __init__(self, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._function, self._args = function, args

    def __call__(self) -> None:
        self._function(*self._args)
