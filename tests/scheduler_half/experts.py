"""vLLM's records of which experts computed each token, with a worker as vLLM's.

From 0.33 on the scheduler tells the worker by keys which records are needed. The worker keeps these
and, as long as there is room, others that were needed last; it raises where a hit has no record.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from integration.engine.mini import BLOCK, Mini
from scheduler_half.parts import Missing


class Records:
    """The records that a worker has, by key, and who still needs them.

    Args:
        room: for so many; what is needed is kept all the same.
    """

    def __init__(self, room: int) -> None:
        self.has: dict[bytes, None] = {}  # least recently needed first
        self._room = room
        self._needed: Counter[bytes] = Counter()
        self._keys: dict[str, list[bytes]] = {}  # of requests under way, in prefix order
        self._made: dict[str, list[int]] = {}  # first block without record, and tokens computed

    def step(self, scheduled: Any, computed: dict[str, int]) -> dict[str, Any]:
        """Carry out what comes with a step: for each request, what its output has.

        Args:
            scheduled: vLLM's `SchedulerOutput`.
            computed: tokens of each of its requests that were computed, or hit, before it.
        """
        from vllm.distributed.aux_output_connector.connector import AuxRequestOutput

        told = scheduled.aux_output_connector_metadata
        for name, keys in told.block_hashes.items():
            self._keys.setdefault(name, []).extend(keys)
            self._needed.update(keys)
        self._needed.update(told.retained_block_hashes or ())
        self._needed.subtract(told.released_block_hashes or ())
        for name, begin in computed.items():
            made = self._made.setdefault(name, [begin // BLOCK, 0])
            made[1] = begin + scheduled.num_scheduled_tokens[name]
        for name, made in self._made.items():  # others of the step can hit these at once
            while made[0] < min(made[1] // BLOCK, len(self._keys.get(name, ()))):
                self.has[self._keys[name][made[0]]] = None
                made[0] += 1
        for name in told.finished_requests:
            self._needed.subtract(self._keys.pop(name, ()))
            self._made.pop(name, None)
        assert min(self._needed.values(), default=0) >= 0, "released twice"
        self._needed = +self._needed
        for name, begin in computed.items():
            hit = self._keys.get(name, [])[: begin // BLOCK]
            assert self.has.keys() >= set(hit), f"{name} hits {begin} tokens, some without record"
        for key in [*self.has]:
            if key in self._needed:
                self.has[key] = self.has.pop(key)
            elif len(self.has) > self._room:
                del self.has[key]
        ends = {name: n + scheduled.num_scheduled_tokens[name] for name, n in computed.items()}
        return {
            name: AuxRequestOutput(begin, np.zeros((max(0, ends[name] - begin), 1, 1), np.uint8))
            for name, begin in told.requests.items()
        }


class RecordsMini(Mini):
    """A `Mini` whose answers say which experts computed each token; one step at a time."""

    def _make_scheduler(self, *args: Any, **more: Any) -> None:
        self.config.aux_output_config = Missing(enabled=True)
        super()._make_scheduler(*args, **more)
        self.records = Records(len(self.pool.blocks))

    def begin_step(self) -> Any:
        """As of any, with what the worker has kept."""
        scheduled = super().begin_step()
        requests = self.scheduler.requests
        computed = {
            name: requests[name].num_computed_tokens - tokens
            for name, tokens in scheduled.num_scheduled_tokens.items()
        }
        _, output = self.queue[0]
        output.aux_output_connector_output = self.records.step(scheduled, computed)
        return scheduled
