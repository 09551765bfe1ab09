"""Kinds of engines of `gpu_kinds` with several ranks, each on a GPU of one host.

Tensor-parallel ranks, pipeline stages, both at once, ranks that hold the same bytes or a part of
each block, experts, and engines side by side. `gpu_nodes` has those of several hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from engine import architectures, model
from engine.gpu_answers import FLIPPED
from engine.gpu_kind import EAGER, GRAPHS, HEADS, MLA, Kind

# vLLM 0.26.0 divides prompts with runner V2 and MLA alone, and without full graphs. With runner V1
# each rank computes all of a prompt, and 0.32.0 does not start. Where ranks have a part of each
# block as well, 0.26.0's plain engine hangs as it warms up.
_DIVIDED = {**EAGER, "attention_backend": MLA["attention_backend"]}

_WORDS = {2: "two", 4: "four"}
_STAGES = {"pipeline_parallel_size": 2}


def _ranks(count: int) -> dict[str, Any]:
    return {"tensor_parallel_size": count}


def flipped(where: str, written: str, engine: dict[str, Any], gpus: int = 1) -> list[Kind]:
    """Bits change in slots of the last rank; of several, the engine gets another one's result."""
    name, engine = f"flipped bits{where}", {**GRAPHS, **engine}
    full = {"KVOFFLOAD_INTEGRITY": "full"}
    return [
        Kind(f"{name}, all loads compared", written, engine, gpus, asked=FLIPPED, settings=full),
        Kind(f"{name}, by default", written, engine, gpus, asked=FLIPPED),
    ]


def _in_parts(name: str, written: str, engine: dict[str, Any], count: int = 2) -> Kind:
    engine = {**engine, **_ranks(count), "decode_context_parallel_size": count}
    name = f"{name}, {_WORDS[count]} ranks with a part of each block"
    return Kind(name, written, engine, count, shards=count)


def _same(name: str, written: str, engine: dict[str, Any], count: int, held: str) -> Kind:
    engine = {**engine, **_ranks(count)}
    return Kind(name, written, engine, count, one_copy=held)


def _divided(name: str, ranks: int, held: str = "", **parallel: int) -> Kind:
    """Ranks that divide a prompt between them (prefill context parallelism)."""
    written = "mla" if ranks == 2 else "mla eight heads"
    engine = {**_DIVIDED, "prefill_context_parallel_size": 2, **parallel}
    name, tried = f"mla, {name} that divide a prompt", {"KVOFFLOAD_ALLOW_UNVERIFIED": "1"}
    return Kind(name, written, engine, ranks, one_copy=held, settings=tried)


MODELS: dict[str, Callable[[Path], object]] = {
    # vLLM 0.26.0 cannot put the parts of an answer together where a rank has one query head.
    "one KV head": partial(model.write_model, heads=8, kv_heads=1, head_dim=128),
    "two heads": partial(model.write_model, heads=2, kv_heads=2, head_dim=128),
    "four heads": partial(model.write_model, heads=4, kv_heads=4, head_dim=128),
    "two KV heads": partial(model.write_model, heads=4, kv_heads=2, head_dim=128),
    "experts": partial(architectures.write, "mixtral", **HEADS),
    "mla": partial(architectures.write, "deepseek_v2"),
    "mla eight heads": partial(
        architectures.write, "deepseek_v2", num_attention_heads=8, num_key_value_heads=8
    ),
}
_TWO = [
    *flipped(" on another rank", "two heads", _ranks(2), gpus=2),
    Kind("graphs, two ranks", "two heads", {**GRAPHS, **_ranks(2)}, gpus=2),
    _same("graphs, two ranks that hold the same", "full", GRAPHS, 2, "0 and 1"),
    _same("mla, two ranks that hold the same", "mla", MLA, 2, "0 and 1"),
    _in_parts("graphs", "one KV head", GRAPHS),
    _in_parts("mla", "mla", MLA),
    _divided("two ranks", 2),
    Kind("graphs, two stages", "full", {**GRAPHS, **_STAGES}, gpus=2),
    Kind(
        "expert parallel, two ranks",
        "experts",
        {**EAGER, **_ranks(2), "enable_expert_parallel": True},
        gpus=2,
    ),
    Kind(
        "data and expert parallel, two engines",
        "experts",
        {**EAGER, "data_parallel_size": 2, "enable_expert_parallel": True},
        gpus=2,
        asked="each_engine",
    ),
]
_FOUR = [
    Kind("graphs, four ranks", "four heads", {**GRAPHS, **_ranks(4)}, gpus=4),
    _same("graphs, four ranks, two of each KV head", "two KV heads", GRAPHS, 4, "0 and 1, 2 and 3"),
    _same("mla, four ranks that hold the same", "mla eight heads", MLA, 4, "0 and 1 and 2 and 3"),
    _in_parts("graphs", "one KV head", GRAPHS, 4),
    _in_parts("mla", "mla eight heads", MLA, 4),
    Kind(
        "mla, four ranks, two with each part of a block",
        "mla eight heads",
        {**MLA, **_ranks(4), "decode_context_parallel_size": 2},
        gpus=4,
        shards=2,
        one_copy="0 and 2, 1 and 3",
    ),
    _divided("four ranks", 4, prefill_context_parallel_size=4),
    _divided("two pairs", 4, held="0 and 1, 2 and 3", **_ranks(2)),
    Kind("graphs, four stages", "full", {**GRAPHS, "pipeline_parallel_size": 4}, gpus=4),
    Kind("graphs, two stages of two ranks", "two heads", {**GRAPHS, **_ranks(2), **_STAGES}, 4),
    Kind(
        "graphs, two stages of two ranks that hold the same",
        "full",
        {**GRAPHS, **_ranks(2), **_STAGES},
        gpus=4,
        one_copy="0 and 1, 2 and 3",
    ),
    Kind(
        "graphs, two engines of two ranks",
        "two heads",
        {**GRAPHS, **_ranks(2), "data_parallel_size": 2},
        gpus=4,
        asked="each_engine",
    ),
    *flipped(" on one of two stages of two ranks", "two heads", {**_ranks(2), **_STAGES}, gpus=4),
]
KINDS = [*_TWO, *_FOUR]
