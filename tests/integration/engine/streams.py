"""How KV cache events of several engines reach routers: numbered, late, and some of them not.

A `Publisher` is what vLLM's `ZmqEventPublisher` does, without its sockets and its thread; a test
compares both. A `Reader` is one router of all engines, which has of each what `Router` has of one.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from copy import deepcopy
from typing import Any, NamedTuple

import msgspec
from integration.engine.router import Router

Payload = Any  # a batch on the wire; before 0.10.2 the batch itself, whose hashes may be too large


class Publisher:
    """One engine's stream.

    Args:
        rank: of the engine, among those of the same data parallelism.
        kept: batches that a reader can ask for once more; vLLM's `buffer_steps`.

    Attributes:
        last: number of the batch that was published last.
        lines: what is on its way to each reader; one that is full loses what comes.
    """

    def __init__(self, rank: int, kept: int) -> None:
        from vllm.distributed.kv_events import BlockStored

        self.rank, self.last = rank, -1
        self.lines = list[deque[tuple[int, Payload]]]()
        self.lost = 0
        self._kept = deque[tuple[int, Payload]](maxlen=kept)
        wire = "medium" in BlockStored.__struct_fields__
        self._pack = msgspec.msgpack.Encoder().encode if wire else deepcopy

    def publish(self, batch: Any) -> None:
        """As an `EventPublisher`."""
        if batch.data_parallel_rank is None:
            batch.data_parallel_rank = self.rank
        self.last += 1
        frame = self.last, self._pack(batch)
        self._kept.append(frame)
        for line in self.lines:
            if line.maxlen is not None and len(line) == line.maxlen:
                self.lost += 1
            else:
                line.append(frame)

    def replay(self, first: int) -> list[tuple[int, Payload]]:
        """The batches from this one on that are kept."""
        return [frame for frame in self._kept if frame[0] >= first]


class Ways(NamedTuple):
    """How a router reads. ``room``: batches on their way from one engine before some are lost.

    ``replays``: whether it asks for what it has not got; otherwise it begins again without.
    """

    room: int
    replays: bool


class Known:
    """What a router has of one engine.

    Attributes:
        at: number of the last batch that it has.
        whole: whether it has all since the engine began, or was cleared.
        completed: how often it had a part, and was told that all is cleared.
        router: what that says.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.at, self.whole, self.completed = -1, True, 0
        self.router = Router(size)

    def begin_again(self) -> None:
        """What came before is not known any more."""
        self.whole, self.router = False, Router(self._size)

    def take(self, seq: int, batch: Any) -> None:
        """The next batch, or the first since `begin_again`."""
        self.at = seq
        self.router.take(batch)
        cleared = any(type(event).__name__ == "AllBlocksCleared" for event in batch.events)
        if cleared and not self.whole:
            self.whole = True
            self.router.wrong.clear()  # of what it had never heard of
            self.completed += 1


class Reader:
    """A router of all engines, which may join late.

    Args:
        publishers: of the engines, by rank.
        ways: how it reads.
        size: tokens of a block.

    Attributes:
        known: what it has of each engine, by the rank that the batches say.
        seen: how often it has missed some, by what it has done.
    """

    def __init__(self, publishers: list[Publisher], ways: Ways, size: int) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        self.ways, self._publishers, self._size = ways, publishers, size
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self.known = {one.rank: Known(size) for one in publishers}
        self.seen = Counter[str]()
        self._lines = [deque[tuple[int, Payload]](maxlen=ways.room) for _ in publishers]
        for publisher, line in zip(publishers, self._lines):
            publisher.lines.append(line)

    def read(self, rng: random.Random, most: int) -> None:
        """Some of what is on its way, from the engines in any order."""
        for _ in range(most):
            waiting = [line for line in self._lines if line]
            if not waiting:
                return
            self._take(*rng.choice(waiting).popleft())

    def read_all(self) -> None:
        """What is on its way, and what was lost behind it where that can be asked for."""
        self.read(random.Random(0), sum(map(len, self._lines)))
        if self.ways.replays:
            for publisher in self._publishers:
                self._catch_up(self.known[publisher.rank], publisher)

    def _take(self, seq: int, payload: Payload) -> None:
        batch = self._batch(payload)
        known = self.known[batch.data_parallel_rank]
        if seq <= known.at:
            return  # it came with a replay
        if seq > known.at + 1:
            publisher = next(p for p in self._publishers if p.rank == batch.data_parallel_rank)
            if not self.ways.replays or not self._catch_up(known, publisher):
                self.seen["began again"] += 1
                known.begin_again()
        if seq > known.at:
            known.take(seq, batch)

    def _catch_up(self, known: Known, publisher: Publisher) -> bool:
        """Ask for what comes behind the last batch; whether any of it is kept."""
        frames = publisher.replay(known.at + 1)
        if not frames:
            return known.at == publisher.last
        self.seen["replayed"] += len(frames)
        if frames[0][0] != known.at + 1:
            self.seen["kept no longer"] += 1
            known.begin_again()
        for seq, payload in frames:
            known.take(seq, self._batch(payload))
        return True

    def _batch(self, payload: Payload) -> Any:
        return self._decode(payload) if isinstance(payload, bytes) else payload
