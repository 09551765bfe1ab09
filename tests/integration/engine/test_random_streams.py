"""Routers of several engines that lose some of their events; `random_streams.py` plays others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("vllm")

import msgspec
import zmq
from integration.engine.random_streams import Rank, run

# 8: a tier is detached. 18: an engine ends. 28: three engines, which are reset often.
SEEDS = (1, 7, 8, 13, 18, 28)
TIMEOUT_S = 60


def test_a_router_that_loses_events_knows_only_what_is_there() -> None:
    found, seen = Counter[str](), Counter[str]()
    for seed in SEEDS:
        routers = run(seed)
        found.update({f"seed {seed}: {what}": n for what, n in routers.found.items() if n})
        seen.update(routers.seen)
    assert not found
    for name in ("replayed", "kept no longer", "began again", "completed", "joined late"):
        assert seen[name] > 3, seen
    for name in ("whole, predicted", "in part, predicted", "BlockRemoved CPU", "lost"):
        assert seen[name] > 300, seen
    assert seen["routed, hit"] > 20 and seen["detached"] and seen["ended"], seen


def test_vllms_own_publisher_numbers_loses_and_replays_the_same() -> None:
    """A reader that does not read holds nobody up, and all that it has lost can be asked for."""
    ranks = run(39).ranks
    assert len(ranks) > 1
    for rank in ranks:
        with published(rank) as (publisher, socket):
            expected = rank.publisher.replay(0)
            assert len(expected) == rank.publisher.last + 1 > 20
            assert publisher._thread.is_alive()
            assert replayed(publisher._replay_endpoint) == expected
            live = received(socket)
            assert len(live) < len(expected) and set(live) <= set(expected)


@contextmanager
def published(rank: Rank) -> Iterator[tuple[Any, Any]]:
    """All that a rank has said, by vLLM's publisher of that rank; and a socket nobody has read."""
    from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

    decode = msgspec.msgpack.Decoder(KVEventBatch).decode
    number, name = rank.publisher.rank, f"inproc://{id(rank)}"
    publisher = ZmqEventPublisher(number, name, f"{name} replay", 1 << 20, hwm=1)
    socket = zmq.Context.instance().socket(zmq.SUB)
    try:
        socket.set_hwm(1)
        socket.connect(publisher._endpoint)
        socket.subscribe(b"")
        for _, payload in rank.publisher.replay(0):
            batch = decode(payload)
            batch.data_parallel_rank = None  # it is the publisher that says it
            publisher.publish(batch)
        end = time.monotonic() + TIMEOUT_S
        while publisher._event_queue.unfinished_tasks:
            assert time.monotonic() < end, "the reader holds the publisher up"
            time.sleep(0.01)
        yield publisher, socket
    finally:
        socket.close(linger=0)
        publisher.shutdown()


def received(socket: Any) -> list[tuple[int, bytes]]:
    """What has arrived at a socket by now: numbers and batches."""
    found = []
    while socket.poll(0):
        _, seq, payload = socket.recv_multipart()
        found.append((int.from_bytes(seq, "big"), payload))
    return found


def replayed(endpoint: str) -> list[tuple[int, bytes]]:
    """All batches that a publisher has kept."""
    socket = zmq.Context.instance().socket(zmq.DEALER)  # there are many replies
    socket.connect(endpoint)
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    found = []
    try:
        while True:
            assert socket.poll(TIMEOUT_S * 1000), "the publisher does not answer"
            *_, seq, payload = socket.recv_multipart()
            if not payload:
                return found
            found.append((int.from_bytes(seq, "big"), payload))
    finally:
        socket.close(linger=0)
