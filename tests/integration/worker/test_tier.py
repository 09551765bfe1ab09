"""One rank's steps on real copies of the CPU device: what it promises, and when it raises."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tier.plans import a_load, a_plan, a_store

from kvoffload_patch.integration.protocol import RESULT
from kvoffload_patch.integration.worker import tier as rank
from kvoffload_patch.links import LOAD, STORE
from kvoffload_patch.tier.plan import TransferPlan
from kvoffload_patch.transfer.backends.torch import TorchBackend

STEP = SimpleNamespace(total_num_scheduled_tokens=5, num_scheduled_tokens={"a": 5})


@pytest.fixture
def runner() -> Any:
    """Seven blocks of KV in one layer."""
    placed = SimpleNamespace(num_blocks=7, kv_cache_tensors=[])
    alone = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
    return SimpleNamespace(
        kv_caches=[torch.arange(105.0).reshape(7, 3, 5)], kv_cache_config=placed, vllm_config=alone
    )


@pytest.fixture
def gate() -> Any:
    """A layer gate through which no load comes by layer."""
    return SimpleNamespace(begin=lambda *_: False, end=lambda: None, close=lambda: None)


@pytest.fixture
def tier(runner: Any, gate: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[rank.RankTier]:
    """A rank whose slots 0 and 1 hold blocks 1 and 2."""
    monkeypatch.setattr(rank, "LayerGate", lambda *_: gate)
    made = rank.RankTier(runner, num_slots=5)
    result = step(made, a_plan(store=a_store(1, (1, 2), (0, 1))))
    assert (result.done_on(STORE), result.failed) == (1, ())
    yield made
    made.close()


def step(tier: rank.RankTier, plan: TransferPlan | None) -> Any:
    """A whole step; returns what it says is done."""
    tier.begin_step(plan, STEP)
    tier.end_forward()
    return getattr(tier.end_step(SimpleNamespace(sampled_token_ids=[[1]], req_ids=["a"])), RESULT)


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise OSError("out of memory")


def test_a_step_that_reads_a_load_which_fails_does_not_begin(
    tier: rank.RankTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchBackend, "load", out_of_memory)
    load = a_load(1, (4, 5), (0, 1))
    plan = a_plan((load,), stores_done=1, wait_load=1, promised_loads=(1,))
    with pytest.raises(RuntimeError) as raised:
        tier.begin_step(plan, STEP)
    assert str(raised.value) == (
        "kvoffload_patch: expected copy 1 from cpu to gpu to arrive for the step that reads "
        "it, found that it failed (out of memory); restart the server, and set "
        "KVOFFLOAD_LOAD_MODE=parked if it happens again, so that such a load is recomputed."
    )


def test_a_load_that_fails_within_the_forward_pass_ends_the_step(
    tier: rank.RankTier, gate: Any
) -> None:
    load = a_load(1, (4, 5), (0, 1))
    tier.begin_step(a_plan((load,), wait_load=1, promised_loads=(1,), layerwise=True), STEP)
    gate.end = lambda: tier._engine._links[LOAD].queue.failed.update({1: "the bus is on fire"})
    with pytest.raises(RuntimeError, match=r"copy 1 .* failed \(the bus is on fire\)"):
        tier.end_forward()


def test_a_load_beside_the_step_may_fail_and_is_told(
    tier: rank.RankTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the step waits for it because another one behind it is read."""
    with monkeypatch.context() as broken:
        broken.setattr(TorchBackend, "load", out_of_memory)
        result = step(tier, a_plan((a_load(1, (4,), (0,)),), stores_done=1))
        assert (result.done_on(LOAD), result.failed) == (1, ((LOAD, 1),))
    plan = a_plan((a_load(2, (5,), (1,)),), wait_load=2, promised_loads=(2,))
    assert step(tier, plan).failed == ((LOAD, 1),)
    assert step(tier, a_plan(loads_done=2)).failed == ()


def test_a_load_that_failed_on_this_rank_alone_raises_once_it_is_read(
    tier: rank.RankTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that reports has it, so the scheduler publishes it and says that it is done."""
    with monkeypatch.context() as broken:
        broken.setattr(TorchBackend, "load", out_of_memory)
        step(tier, a_plan((a_load(1, (4,), (0,)),), stores_done=1))
    assert step(tier, None).failed == ((LOAD, 1),)
    with pytest.raises(RuntimeError, match="expected copy 1 "):
        tier.begin_step(a_plan(wait_load=1, promised_loads=(1,), loads_done=1), STEP)


def test_kv_tensors_that_were_replaced_are_not_read(tier: rank.RankTier, runner: Any) -> None:
    """A plan would move bytes of memory that the runner does not use any more."""
    runner.kv_caches[0] = runner.kv_caches[0].clone()
    step(tier, None)  # nothing is moved
    with pytest.raises(RuntimeError, match="KV tensors of this rank were replaced"):
        tier.begin_step(a_plan(wait_store=1), STEP)


def test_kv_tensors_that_are_gone_are_not_read(tier: rank.RankTier, runner: Any) -> None:
    runner.kv_caches.clear()
    with pytest.raises(RuntimeError, match="KV tensors of this rank were replaced"):
        tier.begin_step(a_plan(wait_store=1), STEP)
