"""A device of a kind on which the tier never ran is refused, unless the user asks for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the package runs where vLLM is installed")

import torch

from kvoffload_patch.integration.worker import rpc
from kvoffload_patch.integration.worker.devices import (
    warn_if_never_run,
    why_refused,
)
from kvoffload_patch.integration.worker.memory import EARLY, begin_early

XPU = torch.device("xpu", 0)


def worker() -> Any:
    """One whose KV tensors would be found on the CPU, were it not refused before."""
    placed = SimpleNamespace(num_blocks=7, kv_cache_tensors=[], kv_cache_groups=[])
    alone = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=1),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        model_config=SimpleNamespace(use_mla=False),
    )
    runner = SimpleNamespace(
        kv_caches=[torch.zeros(7, 3, 5)], kv_cache_config=placed, vllm_config=alone, device=XPU
    )
    return SimpleNamespace(rank=0, model_runner=runner, vllm_config=alone)


@pytest.mark.parametrize(
    ("kind", "name", "hip"),
    [
        pytest.param("npu", "Ascend NPU", None, id="Ascend NPU"),
        pytest.param("cuda", "ROCm", "7.2", id="ROCm"),
        pytest.param("xpu", "XPU", None, id="XPU"),
    ],
)
def test_it_is_refused_in_a_sentence(
    kind: str, name: str, hip: str | None, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    monkeypatch.setattr(rpc, "runner_is_patched", lambda runner: "")
    monkeypatch.setattr(torch.version, "hip", hip)
    one = worker()
    one.model_runner.device = SimpleNamespace(type=kind, index=0)
    error = rpc.describe_rank(one).error
    assert error == (
        f"expected a device on which the tier was run (the CPU or CUDA), found {name}; set "
        "KVOFFLOAD_ALLOW_UNVERIFIED=1 to try it, and compare its answers with those without it"
    )
    record_property("refusal", error)  # for docs/features.md


def test_no_memory_is_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFLOAD_CPU_GIB", "0.1")
    one = worker()
    begin_early(one.model_runner)
    assert not hasattr(one.model_runner, EARLY)


def test_who_asks_for_it_is_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVOFFLOAD_ALLOW_UNVERIFIED", "1")
    assert why_refused(XPU) == ""
    warn_if_never_run(XPU)
    assert "a device of a kind on which it was never run: XPU" in caplog.text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_where_it_ran_nobody_is_asked_or_warned(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert why_refused(torch.device(device)) == ""
    warn_if_never_run(torch.device(device))
    assert caplog.text == ""
