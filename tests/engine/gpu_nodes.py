"""Kinds of engines of `gpu_kinds` whose ranks Ray starts, on two of its nodes with a GPU each.

Both are on this machine. The second has a host name, processes and shared memory of its own, so
that NCCL and vLLM take it for another host: they reach it by sockets, on the loopback.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from engine import nodes
from engine.ray_node import RayNode

from kvoffload_patch.cli.bench.server import free_port
from scripts.matrix.features_releases import name_entry_points

LOST = ("node_lost", "node_lost_at_work")
_RAY = {"distributed_executor_backend": "ray"}
_RANKS = "two heads", {"tensor_parallel_size": 2, **_RAY}
_STAGES = "full", {"pipeline_parallel_size": 2, **_RAY}
# By kind: the folder of its model, arguments of `vllm.LLM` besides, and what is asked.
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "two ranks on two nodes": (*_RANKS, "singles"),
    "two stages on two nodes": (*_STAGES, "singles"),
    "two ranks, a node lost between requests": (*_RANKS, LOST[0]),
    "two ranks, a node lost while it answers": (*_RANKS, LOST[1]),
    "two stages, a node lost between requests": (*_STAGES, LOST[0]),
    "two stages, a node lost while it answers": (*_STAGES, LOST[1]),
}
_NETWORK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
# An engine that has lost a node may wait for an answer that never comes, by default for 300 s.
_TO_LOSE = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "60", "TEST_LEAVES_THREADS": "1"}


@cache
def why_not() -> str:
    """Why there can be no such nodes here; empty if there can."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not importable"
    return nodes.why_no_host()


@contextlib.contextmanager
def started(gpus: str, asked: dict[str, str], scenario: str) -> Iterator[dict[str, str]]:
    """Two nodes; what an engine's environment has to use them.

    Args:
        gpus: names of two; each node sees one of them.
        asked: what it has besides. Ray's processes have it as well: a worker may read a variable
            before the engine sends its own. They have none of the tier's.
        scenario: what is played; of `LOST`, the second node is the one that is lost.
    """
    asked = {**asked, **_NETWORK, **(_TO_LOSE if scenario in LOST else {})}
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # a short path: sockets lie below it
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        name_entry_points(folder / "installed")
        ways = [
            ({**asked, "CUDA_VISIBLE_DEVICES": gpu}, folder / "installed")
            for gpu in gpus.split(",")
        ]
        first = stack.enter_context(RayNode(folder, 1, None, ways[0]))
        second = stack.enter_context(RayNode(folder, 1, first, ways[1]))
        more = {"TEST_LOSE": str(second.pid)} if scenario in LOST else {}
        # vLLM 0.26 looks for the port of its ranks from the 100th behind this one on, which is 0 by
        # default: engines that start at the same time would take the same.
        more["VLLM_DP_MASTER_PORT"] = str(free_port())
        yield {**first.environment, "CUDA_VISIBLE_DEVICES": gpus, **more}


def judge(name: str, when: str, off: dict[str, Any], on: dict[str, Any]) -> dict[str, Any]:
    """How a plain engine and one with the tier end that have lost a node.

    Nothing is counted as an answer: what a request says that has ended so is its error.
    """
    setup, ends = on["setup"], (off[when], on[when])
    told = [{**end, "said": end["said"][:300]} for end in ends]
    about = {"executor": name.rpartition(", ")[0].removeprefix("by "), "when": when}
    good = [
        *nodes.end_alike(*ends),
        _by_ray(off),
        _by_ray(on),
        off["setup"]["slots"] == 0 < setup["slots"],
    ]
    return {
        "runner": setup["runner"],
        "scheduler": setup["scheduler"],
        "answers": 0,
        "answers_equal": 0,
        "blocks_loaded": 0,
        "lost": {**about, "plain": told[0], "tier": told[1]},
        "outcome": "passed" if all(good) else "failed",
    }


def _by_ray(side: dict[str, Any]) -> bool:
    return bool(side["setup"]["executor"].startswith("Ray"))


def judge_answers(off: dict[str, Any], on: dict[str, Any], found: dict[str, Any]) -> list[bool]:
    """What must hold besides equal answers; what was seen goes to ``found``."""
    found["executor"] = on["setup"]["executor"]
    return [_by_ray(off), _by_ray(on)]
