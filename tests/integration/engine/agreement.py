"""Whether all ranks have in each slot what the scheduler takes to be there.

A key is the hash of a prefix, so what its block holds can be worked out from the tokens alone. Of
each rank it is that or, where the ranks share no memory, what the rank itself knows that it lacks:
a store that it has not come to, or one that has failed on it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from scheduler_half.device import _GROUP, BLOCK, value_after

from kvoffload_patch.integration.protocol import attached
from kvoffload_patch.links import CPU, STORE


class Agreement:
    """Looks at every readable slot on every rank; changes nothing.

    Args:
        mini: the engine, a `RanksMini`.

    Attributes:
        compared: slots, over all ranks and looks.
        compared_blocks: of the GPU, likewise.
    """

    def __init__(self, mini: Any) -> None:
        from vllm.v1.core import kv_cache_utils

        self._mini, self._grouped = mini, kv_cache_utils.make_block_hash_with_group_id
        self._groups = len(mini.executor.reporting._windows)
        self._requests = dict[str, Any]()
        self._table = torch.zeros(0, BLOCK, dtype=torch.int64)  # what blocks hold
        self._rows = dict[Hashable, int]()  # of the table, by key
        self._known = dict[str, tuple[int, int]]()  # blocks of a request, and the value behind them
        self.compared = self.compared_blocks = 0
        self._wrong_blocks = dict[int, list[int]]()
        self._before, mini.tier.before_schedule = mini.tier.before_schedule, self._before_schedule

    def meet(self) -> None:
        """Those who ask now may have gone before a step has ended."""
        self._requests.update(self._mini.scheduler.requests)

    def check(self) -> None:
        """Compare them, between two steps.

        Raises:
            AssertionError: a slot holds something else on some rank.
        """
        self._learn()
        if self._mini.breaker.detached:
            return
        manager = self._mini.manager
        keys = [key for key in manager._slot_of if manager.lookup(key) is not None]
        if not keys:
            return
        slots = [manager._slot_of[key] for key in keys]
        right, stored = self._right(keys), dict[int, torch.Tensor]()
        for rank in self._mini.executor.ranks:
            if (tier := attached(rank.runner)) is not None:
                lacks = self._lacks(rank, tier, slots)
                found = tier._host.slots[slots].view(torch.int64)
                differs = (found[:, :BLOCK] != right + rank.apart).any(dim=1).nonzero()
                wrong = {slots[at] for [at] in differs.tolist()} - lacks
                assert not wrong, f"rank {rank.number} has something else in the slots {wrong}"
                self.compared += len(slots)
                if found.shape[1] > BLOCK and not lacks:  # a trainer may forget some ranks
                    weights = stored.setdefault(rank.version, found[:, BLOCK:])
                    assert weights.equal(found[:, BLOCK:]), "ranks stored of other weights"

    def _before_schedule(self) -> None:
        """The tier has taken out what is wrong; an assertion in here would only detach it."""
        self._before()
        self._wrong_blocks = {} if self._mini.queue else self._wrong_on_gpu()

    def check_blocks(self) -> None:
        """What was in the GPU's prefix cache before the step that is scheduled, and in no use.

        Raises:
            AssertionError: a block held something else on some rank.
        """
        assert not self._wrong_blocks, f"blocks that hold something else: {self._wrong_blocks}"

    def _wrong_on_gpu(self) -> dict[int, list[int]]:
        """By rank; no step is under way, and some ranks may not have ended those before.

        Blocks in use may be computed again, or be filled by a load.
        """
        self._learn()
        pool, wrong = self._mini.pool, dict[int, list[int]]()
        blocks = [one for one in pool.blocks if one.block_hash is not None and not one.ref_cnt]
        if not blocks:
            return wrong
        ids, right = [one.block_id for one in blocks], self._right([b.block_hash for b in blocks])
        for rank in self._mini.executor.ranks:
            if not rank.sent:
                held = rank.runner.kv_caches[0][ids, 0][:, :BLOCK]  # weights may be behind
                differs = held != right + rank.apart
                if found := [ids[at] for [at] in differs.any(dim=1).nonzero().tolist()]:
                    wrong[rank.number] = found
                self.compared_blocks += len(ids)
        return wrong

    def _right(self, keys: list[Any]) -> torch.Tensor:
        """What blocks of these keys hold."""
        unknown = [key for key in keys if key not in self._rows]
        assert not unknown, f"nobody has asked for what {len(unknown)} keys are of"
        return self._table[[self._rows[key] for key in keys]]

    def _lacks(self, rank: Any, tier: Any, slots: list[int]) -> set[int]:
        """Slots of which a rank without a board knows that it has not what they are to hold."""
        lacks = set(rank.flipped)  # a load of these is compared, and fails
        if not rank.shape.board:
            store, store_to = tier._engine._links[STORE], self._mini.manager._store_to
            lacks |= store._bad.get(CPU, set())
            lacks |= {slot for slot in slots if store_to[slot] > store.queue._done}
        return lacks

    def _learn(self) -> None:
        """What blocks of requests hold, as far as their keys are made."""
        requests = {**self._requests, **self._mini.scheduler.requests}
        self._requests = dict(self._mini.scheduler.requests)  # others get no more tokens
        more = list[list[int]]()
        for name, request in requests.items():
            blocks, value = self._known.get(name, (0, 0))
            hashes, tokens = request.block_hashes, request.all_token_ids
            for at in range(blocks, len(hashes)):
                row = []
                for token in tokens[at * BLOCK : (at + 1) * BLOCK]:
                    row.append(value := value_after(value, token))
                for group in range(self._groups):
                    self._rows[self._grouped(hashes[at], group)] = len(self._table) + len(more)
                    more.append([one + group * _GROUP for one in row])
            self._known[name] = len(hashes), value
        if more:
            self._table = torch.cat([self._table, torch.tensor(more)])
