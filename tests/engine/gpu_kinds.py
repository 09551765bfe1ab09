"""Plays the installed vLLM on a GPU with the tier and without, and says what it has found so far.

`scripts/matrix gpu` runs it by `gpu_program`, with one object after each kind that has those before
it, too: what has been compared is not lost if the run is ended.

Two model runners (V1, and V2 where the release has it), and for each every kind of engine in
`KINDS` that the GPUs are enough for. For each, one plain engine whose GPU cache keeps every prefix,
and one engine with the tier whose GPU cache is too small for that: both compute the same tokens
behind the same hits, because bf16 answers otherwise depend on where a prompt was cut. Their greedy
answers must be equal, one prompt at a time and, with kernels that compute each request as if it
were alone, also in batches (for models that keep states see `gpu_states`); prompts that differ in
one block must be answered differently, the tier must have loaded blocks, and what else a kind says
must hold.

Needs a GPU and 20 s for each engine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from engine import architectures, drafts, engines, gpu_nodes, gpu_ranks, gpu_states, model
from engine import release as installed
from engine.gpu_answers import BEHIND, COMMANDED, SLEEPS, STATES, compare
from engine.gpu_kind import BLOCKS_KEPT, EAGER, GRAPHS, HEADS, MLA, Kind
from packaging.requirements import Requirement

from scripts.bench.common import visible_gpus

LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
_ONE_COPY = re.compile(r"one copy for ranks that hold the same bytes \((.*?)\)")


def _drafts(method: str, target: str = "target", runners: tuple[str, ...] = ("v1", "v2")) -> Kind:
    config = {
        "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 3},
        "eagle3": {"model": "{models}/drafts/eagle3", "num_speculative_tokens": 2},
        "mtp": {"num_speculative_tokens": 1},
    }[method]
    engine = {**GRAPHS, "speculative_config": {"method": method, **config}}
    return Kind(
        f"drafts, {method}", f"drafts/{target}", engine, runners=runners, asked="guesses_alone"
    )


def _beside_kvcached(name: str, policy: str, **engine: Any) -> Kind:
    """Sixteen blocks have their memory together, and lose it at once; sixty unused ones are kept.

    The CPU tier has 384 slots, fewer than there are blocks computed.
    """
    return Kind(
        f"beside kvcached, {name}",
        "many heads",
        {**GRAPHS, **engine},
        runners=("v1",),
        settings={"KVOFFLOAD_EVICTION": policy, "KVOFFLOAD_CPU_GIB": "0.375"},
        exact=True,
        kvcached={
            "KVCACHED_MAX_CACHED_TOKENS": "960",
            "KVCACHED_MIN_RESERVED_PAGES": "0",
            "KVCACHED_MAX_RESERVED_PAGES": "0",
            "KVCACHED_PAGE_PREALLOC_ENABLED": "false",
        },
    )


def _beside_lmcache() -> Kind:
    """The tier has 192 slots for 324 blocks and the GPU 96, LMCache room for all of them."""
    return Kind(
        "beside LMCache",
        "full",
        {**GRAPHS, "max_model_len": 1024},
        asked="hits_of_both",
        settings={"KVOFFLOAD_CPU_GIB": "0.005859375"},
        exact=True,
        lmcache={
            "LMCACHE_LOCAL_CPU": "True",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": "1",
            "LMCACHE_CHUNK_SIZE": "64",
            "LMCACHE_TRACK_USAGE": "false",
            "PYTHONHASHSEED": "0",
        },
        blocks=(BLOCKS_KEPT, 96),
    )


def _by_ray(name: str) -> Kind:
    written, engine, asked = gpu_nodes.KINDS[name]
    return Kind(f"by Ray, {name}", written, {**GRAPHS, **engine}, gpus=2, asked=asked, ray=True)


def _by_layer(name: str, engine: dict[str, Any]) -> Kind:
    """Blocks of 1 MiB, in four groups of rows, each of which is held up behind the one before."""
    how = {"exact": True, "late": "device", "by_layer": True}
    return Kind(f"loads by layer, {name}", "many heads", engine, **how)


def _states(name: str, ranks: int = 1) -> Kind:
    """Copies are held up; what nobody has run is asked for, as a user would."""
    return Kind(
        f"states{' on two ranks' if ranks > 1 else ''}: {name}",
        gpu_states.KINDS[name][0],
        {**gpu_states.engine(name), "tensor_parallel_size": ranks},
        gpus=ranks,
        groups=2,
        asked=STATES,
        settings={"KVOFFLOAD_ALLOW_UNVERIFIED": "1"},
        variables={"TEST_UNTIMED_KERNELS": "1"},
        blocks=gpu_states.BLOCKS,
        late="device",
        unsteady=gpu_states.UNSTEADY.get(name, 0),
    )


def _in_parts() -> Kind:
    """Two ranks have a part of each block of attention, and the states of their own heads."""
    name = "gated delta net"
    return replace(
        _states(name, ranks=2),
        name=f"states on two ranks with a part of each block: {name}",
        model="gdn, one KV head",
        engine={
            **gpu_states.engine(name),
            "tensor_parallel_size": 2,
            "decode_context_parallel_size": 2,
        },
        parts=True,
        unrepeated=True,
    )


def _at_every_block(name: str) -> Kind:
    """Of `gpu_states.AT_EVERY_BLOCK`."""
    return replace(
        _states(name),
        name=f"states at every block: {name}",
        engine={**gpu_states.engine(name), **gpu_states.EVERY_BLOCK},
        blocks=gpu_states.EVERY_BLOCKS,
        runners=("v1",),
    )


def _gated_delta_nets(way: str) -> Kind:
    """One of `gpu_states.GDN_WAYS`."""
    name = "gated delta net"
    written, more, groups = gpu_states.GDN_WAYS[way]
    return replace(
        _states(name),
        name=f"states {way}: {name}",
        model=written,
        engine={**gpu_states.engine(name), **more},
        gpus=more.get("pipeline_parallel_size", 1),
        groups=groups,
        parts="prefix_match_unit" in more,
        unrepeated=way in gpu_states.UNREPEATED,
    )


def _beside_connector(name: str) -> Kind:
    """Of `gpu_states.BESIDE_CONNECTOR`."""
    return replace(
        _states(name),
        name=f"states beside a KV connector: {name}",
        engine={**gpu_states.engine(name), **gpu_states.BESIDE_CONNECTOR[name]},
        asked="brought_and_kept",
        connector=True,
    )


def _with_n_grams() -> Kind:
    """Mamba 2, for which there are no drafts of its own here."""
    name = "Mamba 2"
    return replace(
        _states(name),
        name=f"states with n-grams: {name}",
        model="guessing mamba2",
        engine={**gpu_states.engine(name), "speculative_config": gpu_states.N_GRAMS},
        runners=("v1",),
        unrepeated=True,
    )


MODELS: dict[str, Callable[[Path], object]] = {
    "full": partial(model.write_model, heads=2, kv_heads=1, head_dim=128),
    "windows": partial(model.write_model, heads=2, kv_heads=1, head_dim=128, window=256),
    "many heads": partial(model.write_model, heads=32, kv_heads=32, head_dim=128),
    "chunks": partial(architectures.write, "llama4_text", **HEADS),
    "drafts": partial(drafts.write, heads=2),
    **gpu_ranks.MODELS,
    **gpu_states.MODELS,
}
KINDS = [
    Kind("no graphs", "full", EAGER),
    Kind("graphs", "full", GRAPHS),
    Kind("graphs, batch invariant", "full", GRAPHS, exact=True),
    _by_layer("eager prefill", GRAPHS),
    _by_layer("default graphs", {"enforce_eager": False}),
    Kind("graphs, windows", "windows", GRAPHS, groups=2),
    # 288 blocks of two groups have room for 1,152 tokens, says vLLM 0.26.0.
    Kind("graphs, chunks", "chunks", {**GRAPHS, "max_model_len": 1024}, groups=4),
    Kind("mla", "mla", MLA),
    *(_states(name) for name in gpu_states.KINDS),
    _states("gated delta net", ranks=2),
    _states("Mamba 2", ranks=2),
    _in_parts(),
    *map(_at_every_block, gpu_states.AT_EVERY_BLOCK),
    *map(_gated_delta_nets, gpu_states.GDN_WAYS),
    *map(_beside_connector, gpu_states.BESIDE_CONNECTOR),
    _with_n_grams(),
    *gpu_ranks.flipped("", "full", {}),
    Kind("sleep", "full", {**GRAPHS, "enable_sleep_mode": True}, asked=SLEEPS),
    Kind(
        "paused, resized and emptied",
        "full",
        GRAPHS,
        asked=COMMANDED,
        settings={"KVOFFLOAD_CONTROL": "1"},
        blocks=(BLOCKS_KEPT, 216),  # as many as others take between two moments
    ),
    _beside_kvcached("adaptive", "adaptive"),
    _beside_kvcached("LRU", "lru"),
    _beside_kvcached("ARC", "arc"),
    _beside_kvcached("ARC, synchronous", "arc", async_scheduling=False),
    _beside_lmcache(),
    _drafts("ngram", runners=("v1",)),
    _drafts("eagle3"),
    _drafts("mtp", target="mtp"),
    *gpu_ranks.KINDS,
    *(_by_ray(name) for name in gpu_nodes.KINDS),
]


def play(folder: Path, gpus: str, runner: str, kind: Kind, tier: bool, few: bool) -> dict[str, Any]:
    """One engine, with as many GPU blocks as hold all prompts or with few; what it answered.

    It sees the GPUs of these names alone.
    """
    engine = {
        "model": str(folder / kind.model),
        "dtype": "bfloat16",
        "block_size": 16,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 2 << 30,  # not measured: other engines come and go
        "num_gpu_blocks_override": kind.blocks[few] // kind.shards,
        **kind.engine,
    }
    if "speculative_config" in engine:
        config = json.dumps(engine["speculative_config"])
        engine["speculative_config"] = config.replace("{models}", str(folder))
    if kind.lmcache and few:
        engine["kv_transfer_config"] = json.dumps(LMCACHE)
    if kind.connector and few:
        engine["kv_transfer_config"] = json.dumps(gpu_states.CONNECTOR)
    settings = {"KVOFFLOAD_CPU_GIB": "1", **kind.settings} if tier else None
    late = kind.late if tier else ""
    env = _environment(gpus, runner, kind, tier, few)
    beside = gpu_nodes.started(gpus, env, kind.asked) if kind.ray else nullcontext(env)
    try:
        with beside as asked:
            run = engines.run(kind.scenarios, engine, settings, late or 0, **asked)
    except subprocess.TimeoutExpired as late_end:
        # Also with text=True what was read until then is bytes.
        said = bytes(late_end.stdout or b"").decode(errors="replace")
        return {"error": f"no end within {late_end.timeout:.0f} s: {said[-3000:]}"}
    except TimeoutError as no_node:
        return {"error": str(no_node)}
    if not run.results:
        return {"error": gpu_states.end_of(run.log)}
    return {**run.results, **_said(run.log)}


def _environment(gpus: str, runner: str, kind: Kind, tier: bool, few: bool) -> dict[str, str]:
    asked = {
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # its multicast is not for every virtual machine
        "CUDA_VISIBLE_DEVICES": gpus,
    }
    if kind.exact:
        asked["VLLM_BATCH_INVARIANT"] = "1"
    if kind.kvcached and tier:
        segment = re.sub(r"\W+", "_", kind.name)  # of kvcached's own, which engines must not share
        asked |= {"KVCACHED_IPC_NAME": segment, "ENABLE_KVCACHED": "true", **kind.kvcached}
        asked["TEST_KVCACHED"] = os.environ["TEST_KVCACHED"]
    if kind.lmcache and few:
        asked |= {"TEST_LEAVES_THREADS": "1", **kind.lmcache}
    if kind.asked == "each_engine":
        asked["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    return asked | kind.variables


def _said(log: str) -> dict[str, Any]:
    """What an engine with the tier says of how it runs."""
    held = _ONE_COPY.search(log)
    return {"one_copy": held.group(1) if held else "", "by_layer": "loads come by layer" in log}


def parts_of(kinds: str) -> list[str]:
    """The parts of names in A|B; names themselves have commas."""
    return kinds.split("|")


def chosen(runners: list[str], parts: list[str], gpus: int) -> list[tuple[str, Kind]]:
    """The kinds whose name has one of these parts, for each runner."""
    return [
        (runner, kind)
        for runner in runners
        for kind in KINDS
        if runner in kind.runners and kind.gpus <= gpus and any(part in kind.name for part in parts)
        if not _why_not(kind)
    ]


def _why_not(kind: Kind) -> str:
    """What a kind needs besides GPUs and is not here; empty if nothing is missing."""
    if kind.kvcached and "TEST_KVCACHED" not in os.environ:
        return "--kvcached was not given"
    if kind.lmcache and not importlib.util.find_spec("lmcache"):
        return "LMCache is not importable"
    return gpu_nodes.why_not() if kind.ray else ""


def _sides(kind: Kind) -> list[tuple[bool, bool]]:
    """Of each engine that is compared: whether it has the tier, and whether it has few blocks."""
    control = kind.asked == STATES or kind.lmcache
    return [(False, False), (True, True), *([(False, True)] if control else [])]


def _score(where: tuple[Path, str, str, Kind], sides: list[Future[dict[str, Any]]]) -> Any:
    """How far answers of engines with few blocks are behind what a plain one computes alone."""
    *place, kind = where
    answers = [side.result().get("outgrown", {}).get("tokens", []) for side in sides]
    variables = {**kind.variables, "TEST_ANSWERS": json.dumps(answers)}
    engine = {name: value for name, value in kind.engine.items() if name != "speculative_config"}
    asked = replace(kind, asked=BEHIND, engine=engine, variables=variables)
    return play(*place, asked, tier=False, few=False)


def pinned(package: str) -> str:
    """The version of a package that the installed vLLM asks for; empty if it asks for none."""
    for line in metadata.requires("vllm") or ():
        asked = Requirement(line)
        if asked.name == package and (asked.marker is None or asked.marker.evaluate()):
            return str(asked.specifier).removeprefix("==")
    return ""


def main(runners: list[str], jobs: int, parts: list[str]) -> Iterator[dict[str, Any]]:
    """Compare every runner and kind of engine, ``jobs`` engines side by side.

    Engines of one GPU are spread over all. Yields the result after each kind.
    """
    import torch

    gpus = visible_gpus(torch.cuda.device_count())
    result: dict[str, Any] = {
        "release": installed.version(),
        "torch": torch.__version__,
        "pinned_torch": pinned("torch"),
        "device": torch.cuda.get_device_name(),
    }
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs) as pool:
        kinds = chosen(runners, parts, len(gpus))
        for kind in KINDS:
            if (why := _why_not(kind)) and any(part in kind.name for part in parts):
                print(f"{kind.name}: left out, because {why}", file=sys.stderr)
        for name in {kind.model.partition("/")[0] for _, kind in kinds}:
            MODELS[name](Path(scratch) / name)
        played = []
        for n, (runner, kind) in enumerate(kinds):
            first = n % (len(gpus) + 1 - kind.gpus)
            where = Path(scratch), ",".join(gpus[first : first + kind.gpus]), runner, kind
            played.append([pool.submit(play, *where, *side) for side in _sides(kind)])
            if kind.asked == STATES:  # each of them began before this one does
                played[-1].append(pool.submit(_score, where, played[-1][1:]))
        for kind, sides in zip(kinds, played):
            runs.append(compare(*kind, *(side.result() for side in sides)))
            names = sorted({run["runner"] for run in runs if "runner" in run})
            yield {**result, "runners": names, "tests": [*runs]}
