"""The result on a runner's output, whatever shape that has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvoffload_patch.integration.adapters import RESULT
from kvoffload_patch.integration.runner import copy_output
from kvoffload_patch.tier.plan import TransferResult

DONE = TransferResult(loads_done=3, stores_done=5)


def test_nothing_stays_nothing() -> None:
    assert copy_output(None, DONE) is None


def test_tensors_for_the_next_stage_are_left_alone() -> None:
    tensors = SimpleNamespace(tensors={})
    assert copy_output(tensors, DONE) is tensors
    assert vars(tensors) == {"tensors": {}}


@pytest.mark.parametrize("name", ["_model_runner_output", "model_runner_output"])
def test_an_asynchronous_output_carries_it_inside(name: str) -> None:
    outputs = pytest.importorskip("vllm.v1.outputs")
    inner = outputs.ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    wrapper = SimpleNamespace(**{name: inner})
    assert copy_output(wrapper, DONE) is wrapper
    assert getattr(wrapper, name) is inner
    assert getattr(inner, RESULT) == DONE
    assert not hasattr(wrapper, RESULT)


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
    second = copy_output(shared, TransferResult(4, 6))
    assert vars(shared) == before
    assert getattr(first, RESULT) == DONE
    assert getattr(second, RESULT) == TransferResult(4, 6)
    assert isinstance(first, outputs.ModelRunnerOutput) and first.req_ids == []
