"""A router that reads vLLM's KV cache events knows what the GPU and the tier hold."""

from __future__ import annotations

import json

from engine.report import assert_same

PLAYED = ["setup", "conversations", "twins", "router"]


def test_a_router_knows_what_both_caches_hold(real, plain, tmp_path):
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
    }
    # Few slots, so that the tier evicts.
    tier = {"KVOFFLOAD_LOAD_MODE": "parked", "KVOFFLOAD_CPU_GIB": "0.022"}
    on = real.on(PLAYED, {"kv_events_config": json.dumps(events)}, tier, late=3)
    assert_same(on["conversations"], plain["conversations"])
    told = on["router"]
    for kind in ("BlockStored GPU", "BlockStored CPU", "BlockRemoved GPU", "BlockRemoved CPU"):
        assert told[kind] >= 5, f"nothing to compare: {kind}"
