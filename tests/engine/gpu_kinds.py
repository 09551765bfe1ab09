"""Plays the installed vLLM on a GPU with the tier and without; prints one JSON object at its end.

`scripts/matrix gpu` runs it as ``python tests/engine/gpu_kinds.py RUNNERS JOBS``, such as
``v1,v2 4``, with the root and tests/ on PYTHONPATH, and adds when and on which commit.

Two model runners (V1, and V2 where the release has it), each without CUDA graphs and with them,
with layers of two kinds (full attention, and a sliding window), and, where there are two GPUs, over
two tensor-parallel ranks and over two pipeline stages. For each, one plain engine whose GPU cache
keeps every prefix, and one engine with the tier whose GPU cache is too small for that: both compute
the same tokens behind the same hits, because bf16 answers otherwise depend on where a prompt was
cut. Their greedy answers must be equal, one prompt at a time, the tier must have loaded blocks, and
two kinds of layers must be two groups.

Needs a GPU and 20 s for each engine.
"""

from __future__ import annotations

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import engines, model
from engine import release as installed

BLOCKS_KEPT, BLOCKS_FEW = 4096, 288  # GPU blocks of 16 tokens
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
SCENARIOS = ["setup", "singles", "batches"]


@dataclass(frozen=True)
class Kind:
    """One way to run an engine; `model` is a folder of `MODELS`."""

    name: str
    model: str
    engine: dict[str, Any]


# Every head has the size that attention kernels for a GPU have; ranks hold different heads.
MODELS: dict[str, dict[str, int]] = {
    "full": {"heads": 2, "kv_heads": 1, "head_dim": 128},
    "windows": {"heads": 2, "kv_heads": 1, "head_dim": 128, "window": 256},
    "two heads": {"heads": 2, "kv_heads": 2, "head_dim": 128},
}
KINDS = [
    Kind("no graphs", "full", {"enforce_eager": True}),
    Kind("graphs", "full", GRAPHS),
    Kind("graphs, windows", "windows", GRAPHS),
]
RANKS = [
    Kind("graphs, two ranks", "two heads", {**GRAPHS, "tensor_parallel_size": 2}),
    Kind("graphs, two ranks that hold the same", "full", {**GRAPHS, "tensor_parallel_size": 2}),
    Kind("graphs, two stages", "full", {**GRAPHS, "pipeline_parallel_size": 2}),
]


def play(folder: Path, runner: str, kind: Kind, tier: bool) -> dict[str, Any]:
    """One engine; what it answered."""
    engine = {
        "model": str(folder / kind.model),
        "dtype": "bfloat16",
        "block_size": 16,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 2 << 30,  # not measured: other engines come and go
        "num_gpu_blocks_override": BLOCKS_FEW if tier else BLOCKS_KEPT,
        **kind.engine,
    }
    settings = {"KVOFFLOAD_CPU_GIB": "1"} if tier else None
    asked = {
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # its multicast is not for every virtual machine
    }
    run = engines.run(SCENARIOS, engine, settings, **asked)
    if not run.results:
        return {"error": run.log[-3000:]}
    return run.results


def compare(runner: str, kind: Kind, off: dict[str, Any], on: dict[str, Any]) -> dict[str, Any]:
    """A plain engine and one with the tier: is every answer the same?"""
    found: dict[str, Any] = {"name": f"{runner}, {kind.name}"}
    for side, results in (("off", off), ("on", on)):
        if "error" in results:
            return {**found, "outcome": "failed", "why": f"{side}: {results['error']}"}
    pairs = list(zip(off["singles"]["tokens"], on["singles"]["tokens"]))
    batched = list(zip(off["batches"]["tokens"], on["batches"]["tokens"]))
    found.update(
        runner=on["setup"]["runner"],
        scheduler=on["setup"]["scheduler"],
        groups=on["setup"]["groups"],
        answers=len(pairs),
        answers_equal=sum(a == b for a, b in pairs),
        batched=len(batched),
        batched_equal=sum(a == b for a, b in batched),
        blocks_loaded=on["batches"]["tier"]["loaded"],
    )
    good = found["answers_equal"] == len(pairs) and found["blocks_loaded"] > 0
    good = good and (found["groups"] > 1) == (kind.model == "windows")
    return {**found, "outcome": "passed" if good else "failed"}


def main(runners: list[str], jobs: int) -> dict[str, Any]:
    """Compare every runner and kind of engine, ``jobs`` engines side by side."""
    import torch

    with tempfile.TemporaryDirectory() as scratch:
        for name, shape in MODELS.items():
            model.write_model(Path(scratch) / name, **shape)
        some = KINDS + RANKS if torch.cuda.device_count() > 1 else KINDS
        kinds = [(runner, kind) for runner in runners for kind in some]
        with ThreadPoolExecutor(jobs) as pool:
            sides = [
                [pool.submit(play, Path(scratch), *kind, tier) for tier in (False, True)]
                for kind in kinds
            ]
        runs = [compare(*kind, *(s.result() for s in side)) for kind, side in zip(kinds, sides)]
    return {
        "release": installed.version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "runners": sorted({r["runner"] for r in runs if "runner" in r}),
        "tests": runs,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1].split(","), int(sys.argv[2]))))
