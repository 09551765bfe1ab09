"""vllm-ascend's runner under the hooks: K and V in tuples, on the stand-in for an Ascend NPU.

The runner has what the released ones have of what hooks touch: `execute_model` that leaves the
output to `sample_tokens`, and `kv_caches` of tuples. No such device has run any of this.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the package runs where vLLM is installed")

from tier.plans import a_load, a_plan, a_store  # noqa: E402
from transfer.standin_npu import StandinNpu, needs_compiler, standin  # noqa: E402

from kvoffload_patch.integration.protocol import PLAN, RESULT, TIER  # noqa: E402
from kvoffload_patch.integration.worker import hooks, rpc  # noqa: E402
from kvoffload_patch.integration.worker.vllm_runner import first_pointer, kv_tensors  # noqa: E402

pytestmark = needs_compiler
NUM_BLOCKS = 7


class Runner:
    """What hooks touch of NPUModelRunner."""

    def __init__(self, npu: StandinNpu) -> None:
        self.npu = npu
        self.device = torch.device("cpu")  # which is an NPU while the stand-in is entered
        self.kv_caches = [
            (torch.zeros(NUM_BLOCKS, 128), torch.zeros(NUM_BLOCKS, 64)) for _ in range(2)
        ]
        self.kv_cache_config = SimpleNamespace(
            num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[]
        )
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
        self.seen: list[Any] = []

    def fill(self, block: int, value: float) -> None:
        for layer in self.kv_caches:
            for part in layer:
                part[block] = value

    def step(self, plan: Any, write: tuple[int, float] | None = None) -> Any:
        """A step that writes a block on the device, late, and reads another one there."""
        tokens = {"num_scheduled_tokens": {"a": 1}, "total_num_scheduled_tokens": 1}
        scheduled = SimpleNamespace(**{PLAN: plan}, **tokens)

        def forward(scheduler_output: Any) -> None:
            if write is not None:
                self.npu.compute(lambda: self.fill(*write))
            self.npu.compute(lambda: self.seen.append(self.kv_caches[1][1][5].clone()))

        assert hooks.execute_model(forward, self, (scheduled,), {}) is None
        output = SimpleNamespace(req_ids=["a"], sampled_token_ids=[[1]])
        return hooks.sample_tokens(lambda grammar: output, self, (None,), {})


def test_a_block_comes_back_on_an_npu(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVOFFLOAD_ALLOW_UNVERIFIED", "1")
    monkeypatch.setattr(rpc, "runner_is_patched", lambda runner: "")
    with standin(tmp_path_factory.getbasetemp()) as npu:
        npu.put(delay_us=300)
        runner = Runner(npu)
        worker = SimpleNamespace(rank=0, model_runner=runner, vllm_config=runner.vllm_config)
        described = rpc.describe_rank(worker)
        assert (described.error, described.block_bytes) == ("", 2 * 4 * (128 + 64))
        opened = rpc.open_rank(worker, 5)
        assert opened.error == "" and opened.copies.startswith("copies direct (")
        runner.step(a_plan(store=a_store(1, (3,), (2,))), write=(3, 41.0))
        runner.step(a_plan(wait_store=1), write=(3, 7.0))
        loads = (a_load(1, (5,), (2,)),)
        output = runner.step(a_plan(loads=loads, wait_load=1, stores_done=1))
        assert getattr(output, RESULT) is not None
        rpc.drain_rank(worker)
        npu.synchronize()
        assert (runner.seen[-1] == 41.0).all(), "the forward pass reads what was loaded"
        assert all((part[5] == 41.0).all() for layer in runner.kv_caches for part in layer)
        rpc.close_rank(worker)
        assert not hasattr(runner, TIER)


def test_without_being_asked_the_rank_takes_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "runner_is_patched", lambda runner: "")
    with standin(tmp_path) as npu:
        runner = Runner(npu)
        worker = SimpleNamespace(rank=0, model_runner=runner, vllm_config=runner.vllm_config)
        assert "found Ascend NPU; set KVOFFLOAD_ALLOW_UNVERIFIED=1" in (
            rpc.describe_rank(worker).error
        )


def test_tuples_of_tensors_are_taken_apart() -> None:
    parts = [torch.zeros(2, 3) for _ in range(4)]
    runner: Any = SimpleNamespace(
        kv_caches=[(parts[0], parts[1]), (parts[2], parts[3])],
        kv_cache_config=SimpleNamespace(kv_cache_tensors=[], kv_cache_groups=[]),
    )
    tensors, dim = kv_tensors(runner)
    assert all(a is b for a, b in zip(tensors, parts)) and dim is None
    assert first_pointer(runner) == parts[0].data_ptr()
    runner.kv_caches = []
    assert first_pointer(runner) is None
    runner.kv_caches = [{"k": parts[0]}]
    with pytest.raises(TypeError, match="a tensor for each layer, found dict"):
        kv_tensors(runner)
