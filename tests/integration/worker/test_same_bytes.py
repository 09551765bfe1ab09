"""Which ranks hold the same bytes, read from layers as they are built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvoffload_patch.integration.worker.same_bytes import same_bytes
from kvoffload_patch.transfer.layout import BlockLayout


class MLAAttentionSpec:
    pass


class FullAttentionSpec:
    pass


class MambaSpec:
    pass


class Projection(torch.nn.Module):
    def __init__(self, replicas: int) -> None:
        super().__init__()
        self.num_kv_head_replicas = replicas


def group(layers: dict[str, Any], mixed: bool = False) -> Any:
    """A group of layers; ``mixed``: with a spec for each."""
    spec = SimpleNamespace(kv_cache_specs=layers) if mixed else next(iter(layers.values()))
    return SimpleNamespace(kv_cache_spec=spec, layer_names=list(layers))


def worker(
    rank: int, ranks: int, groups: list[Any], replicas: dict[str, int], shards: int = 1
) -> Any:
    """A worker whose model has a layer with a projection for each name."""
    model = torch.nn.Module()
    for name, count in replicas.items():
        layer = torch.nn.Module()
        layer.qkv_proj, layer.attn = Projection(count), torch.nn.Identity()
        model.add_module(name, layer)
    placed = SimpleNamespace(kv_cache_groups=groups)
    runner = SimpleNamespace(kv_cache_config=placed, get_model=lambda: model)
    parallel = SimpleNamespace(tensor_parallel_size=ranks, decode_context_parallel_size=shards)
    config = SimpleNamespace(parallel_config=parallel)
    return SimpleNamespace(rank=rank, model_runner=runner, vllm_config=config)


def layout(size: int = 5) -> BlockLayout:
    return BlockLayout([torch.zeros(7, 3, size)], 7)


FULL = {"a.attn": FullAttentionSpec(), "b.attn": FullAttentionSpec()}


def told(ranks: int, groups: list[Any], replicas: dict[str, int], stages: int = 1) -> list[str]:
    """What each rank says."""
    return [
        same_bytes(worker(rank, ranks, groups, replicas), layout())
        for rank in range(ranks * stages)
    ]


def test_kv_heads_are_on_neighbouring_ranks() -> None:
    said = told(4, [group(FULL)], {"a": 2, "b": 2}, stages=2)
    assert said[0] == said[1] != said[2] == said[3] and all(said)
    assert len(set(said)) == 4, "another stage has other layers"


def test_a_latent_is_on_all_ranks() -> None:
    said = told(3, [group({"a.attn": MLAAttentionSpec()})], {})
    assert said[0] and len(set(said)) == 1


@pytest.mark.parametrize("attention", [MLAAttentionSpec(), FullAttentionSpec()])
def test_states_are_each_ranks_own(attention: Any) -> None:
    """Also of a layer that is built as one of attention whose heads are on several ranks."""
    groups = [group({"a.attn": attention}), group({"b.attn": MambaSpec()})]
    assert told(2, groups[:1], {"a": 2})[0]
    assert told(2, groups, {"a": 2, "b": 2}) == ["", ""]
    assert told(2, groups[1:], {"b": 2}) == ["", ""]


@pytest.mark.parametrize(
    ("ranks", "shards", "replicas", "alike"),
    [
        (4, 2, 4, [[0, 2], [1, 3]]),
        (8, 2, 4, [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (4, 4, 4, []),
        (4, 2, 2, []),
        (6, 2, 3, []),  # ranks of two heads would have a part together
    ],
)
def test_with_decode_context_parallelism_those_with_the_same_tokens_are(
    ranks: int, shards: int, replicas: int, alike: list[list[int]]
) -> None:
    of = [group(FULL)], {"a": replicas, "b": replicas}
    latent = [group({"a.attn": MLAAttentionSpec()})], {}
    for groups, heads in (of, latent) if replicas == ranks else (of,):
        said = [same_bytes(worker(r, ranks, groups, heads, shards), layout()) for r in range(ranks)]
        found = [[r for r in range(ranks) if said[r] == text] for text in dict.fromkeys(said)]
        assert (found if said[0] else []) == alike


@pytest.mark.parametrize(
    ("tensor", "prefill", "shards", "alike"),
    [
        (1, 2, 1, []),
        (2, 2, 1, [[0, 1], [2, 3]]),
        (2, 2, 2, [[0, 1], [2, 3]]),  # a part of each block for each of those that divide a prompt
        (2, 2, 4, []),
    ],
)
def test_ranks_that_divide_a_prompt_are_not_the_same(
    tensor: int, prefill: int, shards: int, alike: list[list[int]]
) -> None:
    """Those that compute the same part of it are."""
    groups, said = [group({"a.attn": MLAAttentionSpec()})], []
    for rank in range(tensor * prefill):
        one = worker(rank, tensor, groups, {}, shards)
        one.vllm_config.parallel_config.prefill_context_parallel_size = prefill
        said.append(same_bytes(one, layout()))
    found = [[r for r, text in enumerate(said) if text == one] for one in dict.fromkeys(said)]
    assert (found if said[0] else []) == alike


@pytest.mark.parametrize(
    ("groups", "replicas"),
    [
        ([group(FULL)], {"a": 1, "b": 1}),
        ([group(FULL)], {"a": 2, "b": 1}),  # fewer heads in some layers only
        ([group(FULL)], {"a": 2, "b": 4}),
        ([group(FULL)], {"a": 2}),  # a drafting model's layer
        ([group({"a.attn": MLAAttentionSpec(), **FULL}, mixed=True)], {"b": 1}),
        ([group({"a.attn": MLAAttentionSpec()}), group({"b.attn": FullAttentionSpec()})], {"b": 2}),
        ([], {}),
    ],
)
def test_what_is_divided_in_any_layer_or_not_understood_is_not_the_same(
    groups: list[Any], replicas: dict[str, int]
) -> None:
    assert told(4, groups, replicas) == [""] * 4


def test_one_rank_alone_and_blocks_laid_out_in_another_way_are_not_the_same() -> None:
    assert told(1, [group(FULL)], {"a": 1, "b": 1}) == [""]
    one = worker(0, 2, [group(FULL)], {"a": 2, "b": 2})
    assert same_bytes(one, layout(5)) != same_bytes(one, layout(6))
