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
    """

    def __init__(self, mini: Any) -> None:
        from vllm.v1.core import kv_cache_utils

        self._mini, self._grouped = mini, kv_cache_utils.make_block_hash_with_group_id
        self._groups = len(mini.executor.reporting._windows)
        self._requests = dict[str, Any]()
        self._table = torch.zeros(0, BLOCK, dtype=torch.int64)  # what blocks hold
        self._rows = dict[Hashable, int]()  # of the table, by key
        self._known = dict[str, tuple[int, int]]()  # blocks of a request, and the value behind them
        self.compared = 0

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
        unknown = [key for key in keys if key not in self._rows]
        assert not unknown, f"nobody has asked for what {len(unknown)} keys are of"
        if not keys:
            return
        slots = [manager._slot_of[key] for key in keys]
        right, stored = self._table[[self._rows[key] for key in keys]], dict[int, torch.Tensor]()
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
