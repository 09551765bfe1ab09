"""Runs the installed vLLM on a GPU with the tier and without, and writes one JSON result.

    python scripts/matrix gpu --out DIR

Two model runners (V1, and V2 where the release has it), each without CUDA graphs and with them,
with layers of two kinds (full attention, and a sliding window), and, where there are two GPUs, over
two tensor-parallel ranks and over two pipeline stages. For each, one plain engine whose GPU cache
keeps every prefix, and one engine with the tier whose GPU cache is too small for that: both compute
the same tokens behind the same hits, because bf16 answers otherwise depend on where a prompt was
cut. Their greedy answers must be equal, one prompt at a time, the tier must have loaded blocks, and
two kinds of layers must be two groups.

Needs a GPU and 20 s for each engine; ``--runners v1`` takes one runner only.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from scripts import ROOT

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "engine")]

from engine import engines, model  # noqa: E402
from engine import release as installed  # noqa: E402

from scripts.matrix.engines import commit  # noqa: E402

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


def main() -> None:
    """Compare every runner and graph mode; status 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runners", default="v1,v2")
    parser.add_argument("--jobs", type=int, default=4, help="engines side by side")
    parser.add_argument("--commit", default="", help="of the tree, where git is not at hand")
    args = parser.parse_args()
    import torch

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        for name, shape in MODELS.items():
            model.write_model(Path(scratch) / name, **shape)
        some = KINDS + RANKS if torch.cuda.device_count() > 1 else KINDS
        kinds = [(runner, kind) for runner in args.runners.split(",") for kind in some]
        with ThreadPoolExecutor(args.jobs) as pool:
            sides = [
                [pool.submit(play, Path(scratch), *kind, tier) for tier in (False, True)]
                for kind in kinds
            ]
        runs = [compare(*kind, *(s.result() for s in side)) for kind, side in zip(kinds, sides)]
    release = installed.version()
    result = {
        "kind": "gpu-engine",
        "release": release,
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "device": torch.cuda.get_device_name(),
        "runners": sorted({r["runner"] for r in runs if "runner" in r}),
        "tests": runs,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "seconds": round(time.monotonic() - began),
        "commit": args.commit or commit(),
        "verdict": "green" if all(r["outcome"] == "passed" for r in runs) else "red",
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"gpu-{release}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    raise SystemExit(result["verdict"] != "green")
