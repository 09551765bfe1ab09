"""Two tensor-parallel ranks, one KV head: both hold the same bytes, and one copy is kept."""

from __future__ import annotations

import pytest
from engine import engines
from engine.report import assert_same

RANKS = {"tensor_parallel_size": 2}
FORKED = {"TEST_FORK_WORKERS": "1"}
PLAYED = ["setup", "conversations", "preemption", "reset"]


@pytest.mark.features
@pytest.mark.parametrize("mode", ["inline", "parked"])
def test_two_ranks_with_one_kv_head_keep_one_copy(real, mode):
    model = {"model": real.one_kv_head, **RANKS}
    off = real.off(PLAYED, model, **FORKED)
    on = real.on(PLAYED, model, {"KVOFFLOAD_LOAD_MODE": mode}, late=3, **FORKED)
    for name in PLAYED[1:]:
        assert_same(on[name], off[name])
    assert off["conversations"]["cached"] == 0
    assert on["conversations"]["tier"]["loaded"] > 0.9 * engines.evicted_tokens() // 128
    assert "one copy for ranks that hold the same bytes (0 and 1)" in on.log


@pytest.mark.features
def test_slots_of_one_copy_are_twice_as_many(real):
    model = {"model": real.one_kv_head, **RANKS}
    one = real.on(PLAYED, model, {"KVOFFLOAD_LOAD_MODE": "inline"}, late=3, **FORKED)
    each = real.on(["setup", "twins"], model, {"KVOFFLOAD_INTEGRITY": "full"}, **FORKED)
    assert one["setup"]["slots"] == 2 * each["setup"]["slots"] > 0
    assert "each keeps a copy of them: KVOFFLOAD_INTEGRITY=full" in each.log
    assert each["twins"]["cached"] == [640, 640]


@pytest.mark.features
def test_two_ranks_with_a_kv_head_each_keep_their_own(real):
    run = real.on(["twins"], RANKS, **FORKED)
    assert run["twins"]["cached"] == [640, 640]
    assert "one copy for ranks" not in run.log and "each keeps a copy" not in run.log


@pytest.mark.features
def test_a_killed_rank_ends_the_engine_that_keeps_one_copy(real):
    run = real.on(["worker_killed"], {"model": real.one_kv_head, **RANKS}, **FORKED)
    assert run["worker_killed"]["error"]
