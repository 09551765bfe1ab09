"""Kinds of layers that only the workers are told of."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload_patch.integration.spec_kinds import unknown_layer
from kvoffload_patch.integration.worker import rpc


def config(*groups: Any) -> SimpleNamespace:
    """A KV cache configuration with groups of these specs."""
    made = [SimpleNamespace(kv_cache_spec=one, layer_names=["a", "b"]) for one in groups]
    return SimpleNamespace(kv_cache_groups=made, num_blocks=3, kv_cache_tensors=[])


def group(**kinds: str) -> SimpleNamespace:
    """The spec of a group whose layers have specs of classes with these names."""
    layers = {layer: type(kind, (), {})() for layer, kind in kinds.items()}
    return SimpleNamespace(kv_cache_specs=layers)


def test_each_layer_of_a_group_is_looked_at() -> None:
    known = group(a="FullAttentionSpec", b="HiddenStateCacheSpec"), group(a="MambaSpec")
    assert unknown_layer(config(*known, SimpleNamespace())) == ""
    found = unknown_layer(config(*known, group(a="FullAttentionSpec", b="SinkSpec")))
    assert found.startswith("KV cache group 2: expected one of ")
    assert found.endswith(", found SinkSpec in b")


def test_a_rank_with_a_layer_that_is_not_understood_takes_no_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc, "runner_is_patched", lambda runner: "")
    monkeypatch.setattr(rpc, "why_refused", lambda device: "")
    unknown = config(group(a="FullAttentionSpec", b="SinkSpec"))
    runner = SimpleNamespace(kv_cache_config=unknown, device=None)
    assert (
        "found SinkSpec in b"
        in rpc.describe_rank(SimpleNamespace(rank=0, model_runner=runner)).error
    )


def test_vllms_scheduler_is_told_one_layer_of_a_group() -> None:
    """Why the check of the scheduler's groups does not do."""
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    torch = pytest.importorskip("torch")
    full = interface.FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    layers = {"a": full, "b": type("SinkSpec", (type(full),), {})(**vars(full))}
    uniform = interface.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=layers)
    made = interface.KVCacheConfig(3, [], [interface.KVCacheGroupSpec(["a", "b"], uniform)])
    assert "found SinkSpec in b" in unknown_layer(made)
    told = utils.generate_scheduler_kv_cache_config([replace(made)])
    (seen,) = told.kv_cache_groups
    assert type(seen.kv_cache_spec) is type(full) and unknown_layer(told) == ""
