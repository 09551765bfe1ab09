"""`kvoffload bench` with real servers on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine import engines, few_cores, release
from engine.model import write_model
from sandbox import ROOT

from scripts.bench.probes.switches import MECHANISMS

BLOCK = min(32, release.block_size())
HISTORY, BLOCKS = 320, 768 // BLOCK


@pytest.mark.features
def test_histories_come_back_with_the_tier_alone(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    words = [
        *("--model", str(model), "--modes", "off,on", "--cpu-gib", "0.25"),
        *("--gpu-blocks", str(BLOCKS), "--history", str(HISTORY), "--turns", "2"),
        # One at a time: of two clients one can be late, and the GPU then still has a history.
        *("--answer", "4", "--at-once", "1", "--out", str(tmp_path / "out"), "--json", "--"),
        *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK)),
        *("--max-num-seqs", "4"),
    ]
    env = engines.environment(VLLM_ENABLE_V1_MULTIPROCESSING="1", **few_cores.EAGER)
    done = subprocess.run(
        [sys.executable, "-m", "kvoffload_patch", "bench", *words],
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["gpu_tokens"] == BLOCKS * BLOCK and found["chats"] == 5
    off, on = (found["modes"][mode]["later"] for mode in ("off", "on"))
    assert off["requests"] == on["requests"] == 5
    assert off["prompt_tokens"] == on["prompt_tokens"] > 5 * HISTORY
    assert off["found_tokens"] == 0
    assert on["found_tokens"] >= 5 * (HISTORY // BLOCK * BLOCK - BLOCK)
    assert [file.name for file in Path(tmp_path / "out").glob("*.log")]


def test_a_trace_of_conversations_has_their_loads_and_a_floor_without(tmp_path: Path) -> None:
    """What it observes are parts of the package that nothing else names."""
    variants = probed(
        tmp_path, "trace", "--small", "--seconds", "1", "--period", "0.8", "--settle", "0.3",
        "--only", "nothing",
    )["figures"]["variants"]  # fmt: skip
    blocks = {name: one["blocks"] for name, one in variants.items()}
    assert blocks.pop("floor") == 0 and set(blocks) == {"on", "nothing"}
    assert min(blocks.values()) > 1, blocks


def test_mechanisms_are_switched_off_one_at_a_time(tmp_path: Path) -> None:
    """Each replaces a part of the package that nothing else names."""
    model = write_model(tmp_path / "model")
    engine = {
        "max_model_len": 4096, "num_gpu_blocks_override": 4096 // BLOCK + 2, "max_num_seqs": 8,
        "dtype": "float32", "enforce_eager": True, "block_size": BLOCK, "seed": 0,
    }  # fmt: skip
    rounds = probed(
        tmp_path, "mechanisms", "--model", str(model), "--engine", json.dumps(engine),
        "--parts", "turn,arrivals,fresh", "--cycles", "1", "--settle", "0", "--phase", "0.1",
        "--sessions", "8", "--tokens", "200", "--answer", "2", "--decodes", "2", "--fresh", "2",
        "--at-once", "1", "--vocabulary", "60",
    )["rounds"]  # fmt: skip
    assert {one["without"] for one in rounds} == set(MECHANISMS)
    assert all(one["turn"] > 0 and one["fresh, all"] > 0 for one in rounds)


def probed(folder: Path, command: str, *words: str) -> Any:
    """What a command of scripts/bench that needs a tier has written."""
    found = folder / "found.json"
    armed = (sys.executable, "-m", "kvoffload_patch", "--cpu-gib", "0.25", sys.executable)
    done = subprocess.run(
        [*armed, str(ROOT / "scripts/bench"), command, *words, "--json", str(found)],
        env={**engines.environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(found.read_text())
