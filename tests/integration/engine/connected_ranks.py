"""Several ranks behind a KV connector, each of which fills its own blocks, or fails to.

The executor then has the output of every rank before the engine gets that of one, with what the
connector says of all of them, as vLLM's `KVOutputAggregator` does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from engine.late_copies import StreamQueue
from integration.engine.connectors import WRONG, RandomConnector
from integration.engine.mini import BLOCK
from integration.engine.modelled_rank import Rank, Step
from integration.engine.several_ranks import RanksMini
from scheduler_half.device import _GROUP, value_after
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput

from kvoffload_patch.integration.protocol import attached

_Load = tuple[str, list[int], list[list[int]], int]  # request, tokens, tables, first block to fill


@dataclass
class _Loads(KVConnectorMetadata):
    """Loads that a step begins."""

    made: list[_Load] = field(default_factory=list)


@dataclass
class _Said:
    """What the connector of a rank says with a step's output."""

    arrived: set[str] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)


class ConnectedRank(Rank):
    """A rank whose connector fills blocks before the forward pass, as the host comes to it.

    Attributes:
        connector: its scheduler's side; None until that is there.
        under_way: loads beside the step.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.runner.vllm_config.kv_transfer_config = SimpleNamespace()
        self.connector: RanksConnector | None = None
        self.under_way = list[_Load]()

    def _prepare(self, scheduled: Any) -> None:
        super()._prepare(scheduled)
        if self.connector is not None:
            self.connector.bring(self, scheduled)


class StreamRank(ConnectedRank):
    """One whose copies are made when the forward pass begins that waits for them.

    The host is ahead of its stream: a connector that fills a block does it before those copies of
    that block for which only the stream waits.
    """

    queue = StreamQueue

    def opened(self, *about: Any) -> None:
        """The tier is there: no other rank's copies are on these streams."""
        super().opened(*about)
        self._queues = [link.queue for link in attached(self.runner)._engine._all]
        for queue in self._queues:
            StreamQueue.made.remove(queue)
            queue.made = self._queues

    def _prepare(self, scheduled: Any) -> None:
        super()._prepare(scheduled)
        for queue in self._queues:
            queue.forward_begins()


class RanksConnector(RandomConnector):
    """As `RandomConnector`, on every rank of an engine; each may fail by itself.

    Args:
        mini: a `ConnectedRanks`.
        seed: of what it does.

    Attributes:
        alone: loads that have failed on some ranks and not on others.
    """

    def __init__(self, mini: ConnectedRanks, seed: int) -> None:
        self._seed, self.alone = seed, 0
        self._said = dict[int, dict[int, _Said]]()  # by step and rank
        self._awaited = dict[str, set[int]]()  # ranks on which a load has not arrived
        super().__init__(mini, seed)
        # Up to 0.11 what ends gives its blocks back though some ranks still fill them.
        finish = type(mini.scheduler).finish_requests.__code__
        self._at_once = self._ends and "delay_free_blocks" not in finish.co_varnames

    def _take_part(self, mini: Any) -> None:
        self._end_step, mini.end_step = mini.end_step, self._forget
        self._executor = mini.executor
        self._carry_out, mini.executor.carry_out = mini.executor.carry_out, self._aggregated
        for rank in mini.executor.ranks:
            rank.connector = self

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        made = [(name, *load) for name, load in self._loads.items()]
        self._loads.clear()
        if self._beside:
            self._awaited.update({name: {r.number for r in self._ranks} for name, *_ in made})
        return _Loads(made)

    @property
    def _ranks(self) -> list[ConnectedRank]:
        return self._executor.ranks  # type: ignore[no-any-return]

    def bring(self, rank: ConnectedRank, scheduled: Any) -> None:
        """On a rank, before its forward pass of a step."""
        metadata = getattr(scheduled, "kv_connector_metadata", None)
        rank.under_way += metadata.made if isinstance(metadata, _Loads) else []
        said = self._said.setdefault(id(scheduled), {})[rank.number] = _Said()
        for load in list(rank.under_way):
            name, number = load[0], 0 if self._at_once else rank.number
            arrives = random.Random(f"{self._seed} {name} {number} {rank.steps}").random() < 0.4
            if not self._beside or arrives:
                rank.under_way.remove(load)
                said.arrived |= {name} if self._beside else set()
                fails = self._may_fail and self._rng.random() < 0.25
                said.invalid |= self._fill(rank, load, fails)
                self.loads += 1
                self.failed += fails

    def _fill(self, rank: ConnectedRank, load: _Load, fails: bool) -> set[int]:
        """The blocks of one load that were not filled: of one that fails, those behind some."""
        _, tokens, tables, first = load
        values, value, lost = list[int](), 0, set[int]()
        for token in tokens:
            values.append(value := value_after(value, token))
        good = self._rng.choice([first, first + 1, len(tables[0]) - 1])
        for group, table in enumerate(tables):
            for at in range(first, len(table)):
                right = [one + group * _GROUP for one in values[at * BLOCK : (at + 1) * BLOCK]]
                wrong = fails and at >= good
                if table[at]:  # or else it is the null block: nobody looks at it
                    rank.kv[table[at]] = list(WRONG) if wrong else right
                    lost |= {table[at]} if wrong else set()
        return lost

    def _aggregated(self, step: Step) -> Any:
        """The output of a step, when every rank has come to its end."""
        output = self._carry_out(step)
        for rank in self._ranks:
            while step in rank.sent:
                self._executor.work(1)
        said = self._said.pop(id(step.scheduled), {})
        invalid = set[int]().union(*(one.invalid for one in said.values()))
        self.alone += 0 < sum(bool(one.invalid) for one in said.values()) < len(self._ranks)
        arrived = {name for number, one in said.items() for name in self._arrives(number, one)}
        sent = {name for name in self._sending if self._rng.random() < 0.3}
        self._sending = [name for name in self._sending if name not in sent]
        if arrived or invalid or sent:
            done = {"finished_sending": sent or None, "finished_recving": arrived or None}
            output.kv_connector_output = KVConnectorOutput(**done, invalid_block_ids=invalid)
            if invalid and self._ends:  # vLLM ends requests that it has not answered
                self._mini.counts = dict.fromkeys(self._mini.counts, 0)
        return output

    def _arrives(self, number: int, said: _Said) -> list[str]:
        """Requests whose load has arrived on every rank, now that it has on this one."""
        for name in said.arrived:
            self._awaited[name].discard(number)
        return [name for name in said.arrived if not self._awaited[name]]

    def over(self) -> None:
        """Step until everything is sent, and all loads of requests that have ended arrived."""
        while self._sending or any(self._awaited.values()) or self._mini.queue:
            if not self._mini.queue:
                self._mini.begin_step()
            self._mini.end_step()

    def _forget(self) -> None:
        self._end_step()
        if self._may_fail and not self._ends:
            for rank in self._ranks:
                for name, sequence in rank._sequences.items():
                    if name in self._mini.scheduler.requests:
                        sequence.tokens = self._mini._tokens(name)


class ConnectedRanks(RanksMini):
    """`RanksMini` beside a connector: of a step that lacked blocks vLLM drops some tokens.

    Attributes:
        leaves: how often a request of a step is aborted while that is under way, as an engine does
            before it takes the output in.
        left: how many were.
    """

    leaves, left = 0.0, 0

    def end_step(self) -> None:
        names = list(self.queue[-1][0].num_scheduled_tokens) if self.leaves else []
        if names and self._rng.random() < self.leaves:
            name = self._rng.choice(names)
            if name in self.scheduler.requests:
                self.abort(name)
                self.left += 1
        self._before = {name: len(tokens) for name, tokens in self.answers.items()}
        super().end_step()

    def _check_sampled(self, step: Step) -> None:
        assert len(step.sampled) == len(self.executor.ranks)
        for at, name in enumerate(step.scheduled.num_scheduled_tokens):
            given = self.answers[name][self._before[name] :]
            found = [sampled[at][: len(given)] for sampled in step.sampled.values()]
            assert found == [given] * len(found), "a rank has computed upon wrong bytes"
