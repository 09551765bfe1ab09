"""Traps that lie between the scheduler's steps and the ranks, and need no release's sources."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvoffload_patch.integration.protocol import TIER
from kvoffload_patch.integration.worker import rpc

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(("tokens", "waits"), [(0, 1), (5, 0)])
def test_up_to_0_13_an_engine_with_only_parked_work_would_spin(
    tokens: int, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loop does not sleep, so a rank waits in steps without tokens, and only in those."""
    alone = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
    placed = SimpleNamespace(num_blocks=7, kv_cache_tensors=[], kv_cache_groups=[])
    runner = SimpleNamespace(
        kv_caches=[torch.zeros(7, 3, 5)], kv_cache_config=placed, vllm_config=alone
    )
    worker = SimpleNamespace(rank=0, model_runner=runner, vllm_config=alone)
    assert rpc.open_rank(worker, 5).error == ""
    tier, waited = getattr(runner, TIER), []
    monkeypatch.setattr(tier._engine, "wait_loads", waited.append)
    scheduled = {"a": tokens} if tokens else {}
    step = SimpleNamespace(total_num_scheduled_tokens=tokens, num_scheduled_tokens=scheduled)
    tier.begin_step(None, step)
    tier.end_step(SimpleNamespace(sampled_token_ids=[], req_ids=[]))
    rpc.close_rank(worker)
    assert len(waited) == waits
    assert all(0.0005 <= seconds <= 0.002 for seconds in waited), "a new request waits as well"
