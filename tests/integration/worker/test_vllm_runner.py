"""The result on a runner's output, whatever shape that has."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tier.plans import a_result

from kvoffload_patch.integration.engine import hooks as engine_hooks
from kvoffload_patch.integration.protocol import RESULT, TIER
from kvoffload_patch.integration.worker.hooks import execute_model
from kvoffload_patch.integration.worker.vllm_runner import (
    block_layout,
    copy_output,
    first_pointer,
    kv_tensors,
)

DONE = a_result(loads_done=3, stores_done=5)


def test_nothing_stays_nothing() -> None:
    assert copy_output(None, DONE) is None


def test_tensors_for_the_next_stage_are_left_alone() -> None:
    tensors = SimpleNamespace(tensors={})
    assert copy_output(tensors, DONE) is tensors
    assert vars(tensors) == {"tensors": {}}


class Stream:
    """Of a device that does everything at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    wait_stream = record = synchronize = __init__


def first_runners_output(inner: Any, sampled: Any) -> Any:
    """What model runner V1 answers with asynchronous scheduling."""
    from vllm.v1.worker import gpu_model_runner

    more = {"model_runner_output": inner, "sampled_token_ids": sampled, "vocab_size": 9}
    return made(gpu_model_runner.AsyncGPUModelRunnerOutput, more)


def second_runners_output(inner: Any, sampled: Any) -> Any:
    """What model runner V2 answers."""
    from vllm.v1.worker.gpu import async_utils

    sampler = SimpleNamespace(
        sampled_token_ids=sampled, logprobs_tensors=None, num_nans=None, num_rejected=None,
        sampling_mask_tensors=None,
    )  # fmt: skip
    num_sampled = torch.ones(len(sampled), dtype=torch.int32)
    more = {
        "model_runner_output": inner, "sampler_output": sampler, "num_sampled_tokens": num_sampled,
        "num_sampled_tokens_np": num_sampled.numpy(),
    }  # fmt: skip
    return made(async_utils.AsyncOutput, more)


def made(kind: type, known: dict[str, Any]) -> Any:
    """An output of vLLM's, with nothing but what it needs."""
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in known:
            arguments[name] = known[name]
        elif "stream" in name:
            arguments[name] = Stream()
        elif parameter.default is parameter.empty:
            arguments[name] = [] if name == "invalid_req_indices" else None
    return kind(**arguments)


@pytest.fixture(params=[first_runners_output, second_runners_output])
def asynchronous(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An output of one of vLLM's runners, whose tokens come later."""
    outputs = pytest.importorskip("vllm.v1.outputs")
    for name in ("Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    for name in ("stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    inner = outputs.ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    return request.param(inner, torch.tensor([[7]]))


def test_an_asynchronous_output_carries_it_inside(asynchronous: Any) -> None:
    output = asynchronous
    assert copy_output(output, DONE) is output
    assert not hasattr(output, RESULT)
    taken = output.get_output()
    assert getattr(taken, RESULT) == DONE and taken.sampled_token_ids == [[7]]


def test_a_synchronous_output_carries_it_itself() -> None:
    outputs = pytest.importorskip("vllm.v1.outputs")
    output = outputs.ModelRunnerOutput(
        req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=[[7]]
    )
    assert copy_output(output, DONE) is output
    assert getattr(output, RESULT) == DONE
    assert output.sampled_token_ids == [[7]]


def test_the_shared_empty_output_is_not_written_to() -> None:
    outputs = pytest.importorskip("vllm.v1.outputs")
    shared = outputs.EMPTY_MODEL_RUNNER_OUTPUT
    before = dict(vars(shared))
    first = copy_output(shared, DONE)
    second = copy_output(shared, a_result(4, 6))
    assert vars(shared) == before
    assert getattr(first, RESULT) == DONE
    assert getattr(second, RESULT) == a_result(4, 6)
    assert isinstance(first, outputs.ModelRunnerOutput) and first.req_ids == []


def held(*tensors: Any, in_list: bool = True) -> Any:
    """A layer, as up to 0.19 with a list, of one tensor or of all states."""
    return SimpleNamespace(kv_cache=list(tensors) if in_list else tensors[0])


@pytest.mark.parametrize("in_list", [False, True])
def test_tensors_that_the_runners_list_leaves_out_are_taken_from_the_layers(in_list: bool) -> None:
    """Up to 0.14 it has one layer of each index: not the indexers of DeepSeek-V3.2."""
    latent, keys, state = (torch.arange(6 * n).reshape(6, n) for n in (8, 2, 3))
    layers = {
        "layers.0.attn": held(latent, in_list=in_list),
        "layers.0.indexer.k_cache": held(keys, in_list=in_list),
        "layers.1.attn": held(keys, in_list=in_list),  # shares the one before
        "layers.2.mixer": SimpleNamespace(kv_cache=[(state,)]),
        "layers.3.attn": SimpleNamespace(kv_cache=[torch.tensor([])]),  # not bound
        "layers.4.mlp": SimpleNamespace(),
    }
    names = [*layers, "layers.9.attn"]  # the last one is another stage's
    groups = [SimpleNamespace(layer_names=names[:3]), SimpleNamespace(layer_names=names[3:])]
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    placed = SimpleNamespace(num_blocks=6, kv_cache_tensors=[], kv_cache_groups=groups)
    runner = SimpleNamespace(kv_caches=[latent], kv_cache_config=placed, vllm_config=config)
    layout = block_layout(runner)
    assert layout.block_bytes == 8 * (8 + 2 + 3)
    found, _ = kv_tensors(runner)
    assert len(found) == 3 and all(map(torch.equal, found, (latent, keys, state)))


def test_from_0_29_on_blocks_are_counted_by_the_first_dimension_whatever_others_are() -> None:
    whole = torch.arange(6 * 2 * 6.0).reshape(6, 2, 6)  # block, layer, content
    placed = SimpleNamespace(
        num_blocks=6, kv_cache_tensors=[SimpleNamespace(layer_stride=6)], kv_cache_groups=[]
    )
    runner = SimpleNamespace(kv_caches=[whole[:, 0], whole[:, 1]], kv_cache_config=placed)
    layout = block_layout(runner)
    assert [row.view(torch.float32).tolist() for row in layout.rows] == [whole.flatten(1).tolist()]


def test_states_of_a_layer_come_as_a_list_up_to_0_28() -> None:
    """Convolution and state in one page with padding behind them, attention over all of it."""
    blocks, page = 6, 64  # bytes
    pages = torch.arange(blocks * page, dtype=torch.int32).to(torch.uint8)
    conv = pages.view(torch.bfloat16).as_strided((blocks, 3, 2), (page // 2, 2, 1), 0)
    state = pages.view(torch.float32).as_strided((blocks, 2, 5), (page // 4, 5, 1), 3)
    keys_and_values = pages.view(torch.bfloat16).view(blocks, 2, 16).transpose(0, 1)
    alone = pages.clone().view(torch.float32).as_strided((blocks, 10), (page // 4, 1), 3)
    placed = SimpleNamespace(
        kv_cache_tensors=[SimpleNamespace()], num_blocks=blocks, kv_cache_groups=[]
    )
    runner = SimpleNamespace(
        kv_caches=[[conv, state], keys_and_values, [alone]], kv_cache_config=placed
    )
    layout = block_layout(runner)
    assert first_pointer(runner) == conv.data_ptr()
    assert [tuple(row.shape) for row in layout.rows] == [(blocks, page), (blocks, 40)]
    assert torch.equal(layout.rows[0].flatten(), pages)


class Recorded:
    """A rank's tier that notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin_step(self, plan: object, step: object) -> None:
        """Before the forward pass."""
        self.calls.append("begin")

    def end_forward(self) -> None:
        """After the forward pass."""
        self.calls.append("end of the forward pass")

    def end_step(self, output: object) -> object:
        """After the step."""
        self.calls.append("end")
        return output


def test_a_step_goes_through_the_tier() -> None:
    runner = SimpleNamespace(**{TIER: Recorded()})
    step = SimpleNamespace()
    assert execute_model(lambda *_, **__: "output", runner, (step,), {}) == "output"
    assert getattr(runner, TIER).calls == ["begin", "end of the forward pass", "end"]


@pytest.mark.parametrize("by_name", [True, False])
def test_a_profiling_or_dummy_pass_of_runner_v2_does_not(by_name: bool) -> None:
    runner = SimpleNamespace(**{TIER: Recorded()})
    args, kwargs = (SimpleNamespace(), None), {"dummy_run": True, "is_profile": True}
    if not by_name:
        args, kwargs = (*args, True), {}
    assert execute_model(lambda *_, **__: "output", runner, args, kwargs) == "output"
    assert getattr(runner, TIER).calls == []


def test_profiling_passes_end_before_a_tier_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    # From 0.20 on the KV cache is first made for profiling, and made again for serving.
    order: list[str] = []
    monkeypatch.setattr(engine_hooks, "attach", lambda *_: order.append("attach"))
    core = SimpleNamespace(vllm_config=None)
    engine_hooks.init(lambda *_: order.append("profile and start"), core, (None, object), {})
    assert order == ["profile and start", "attach"]
