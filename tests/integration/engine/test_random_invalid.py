"""Connectors whose loads fail on some ranks, always the same; `random_invalid.py` plays others."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from integration.engine.random_invalid import describe, run
from integration.engine.seeds import played

# Notice that a failed load is taken out of the tier: 0, 2, 4, 5, 18; what the host waits for before
# a connector fills blocks: 17; that a request which has left had computed upon it: 41; that what is
# wrong leaves the prefix cache: 2, 18. Loads that fail beside the step end requests in 52 and 64.
SEEDS = (0, 2, 4, 5, 7, 9, 11, 15, 17, 18, 22, 41, 51, 52, 64)


def test_no_token_and_no_slot_rests_on_a_block_that_some_rank_did_not_fill() -> None:
    seen = played(run, SEEDS, describe)
    wanted = ("loaded", "stored", "evicted", "resumed", "compared", "failed stores", "left")
    of_connector = ("connector failed", "connector alone", "connector sent")
    for name in (*wanted, "compared blocks", *of_connector):
        assert seen[name], f"no run has {name} anything"
    for how in ("within", "beside"):
        for policy in ("ends", "recomputes"):
            assert seen[f"{how}, {policy}"], f"no load has failed: {how}, {policy}"
