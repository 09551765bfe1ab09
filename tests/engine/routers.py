"""What a router learns of an engine: vLLM's published KV cache events, read as they come."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import zmq

sys.path.append(str(Path(__file__).resolve().parents[1]))

TIMEOUT_MS = 20_000


def batches(endpoint: str) -> list[Any]:
    """Every batch that the engine has published since its start, by its replay endpoint."""
    from vllm.distributed.kv_events import KVEventBatch

    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    socket = zmq.Context.instance().socket(zmq.DEALER)  # there are many replies
    socket.connect(endpoint)
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    found = []
    try:
        while True:
            assert socket.poll(TIMEOUT_MS), "the publisher does not answer"
            payload = socket.recv_multipart()[-1]
            if not payload:
                return found
            found.append(decoder.decode(payload))
    finally:
        socket.close(linger=0)


def compare(stage: Any) -> dict[str, int]:
    """Replay what was published, and compare it with the caches; blocks by kind of event."""
    from scheduler_half.replay import Replay

    core = stage.core
    publisher = core.scheduler.kv_event_publisher
    publisher._event_queue.join()
    replay = Replay(core.scheduler, listens=False)
    for batch in batches(publisher._replay_endpoint):
        replay.publish(batch)
    replay.check(stage.tier and stage.tier._manager)
    return dict(replay.seen)
