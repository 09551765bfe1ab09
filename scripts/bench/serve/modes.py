"""What `bench serve` compares: for each mode its environment, engine arguments and command.

A mode is a name of `NAMES`; variables may follow `ours`, as in ours+KVOFFLOAD_LOAD_MODE=parked.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

from scripts import ROOT, Refused
from scripts.bench.serve.sizes import Sizes

NAMES = ("off", "ours", "simple", "offloading", "lmcache")
# Of vLLM itself; on its CPU build they have the copies of `host_copies`.
CONNECTORS = ("simple", "offloading")
CHILD = "scripts.bench.serve.child"


def parse(text: str) -> tuple[str, dict[str, str]]:
    """A mode's name, and the variables that are set for it.

    Raises:
        Refused: not the name of a mode, or not variables.
    """
    name, *settings = text.split("+")
    if name not in NAMES:
        raise Refused(f"mode {text!r}: expected one of {', '.join(NAMES)}")
    if settings and (name != "ours" or not all("=" in each for each in settings)):
        raise Refused(f"mode {text!r}: expected ours+NAME=VALUE+NAME=VALUE")
    return name, dict(each.split("=", 1) for each in settings)


def unavailable(mode: str) -> str:
    """Why a mode cannot run here, or an empty text."""
    if parse(mode)[0] != "lmcache" or importlib.util.find_spec("lmcache"):
        return ""
    return (
        "lmcache is not installed; `scripts/bench lmcache` packs it for a machine without network"
    )


def tier_gib(mode: str, engine: str, sizes: Sizes) -> float:
    """GiB of CPU memory that a mode is given in an engine; 0 for none."""
    name = parse(mode)[0]
    if name == "off":
        return 0.0
    main = sizes.cpu_gib if name in ("ours", "simple") else sizes.offloading_gib
    if engine == "pressure":
        return sizes.pressure_cpu_gib
    most = {"long": sizes.s1long_cpu_gib, "tokens": 2.0, "pressure_tokens": 2.0}
    return min(main, most.get(engine, main))


def environment(mode: str, gib: float, small: bool) -> dict[str, str]:
    """The environment of a mode's process: this one's, without what would decide for it."""
    name, settings = parse(mode)
    ours = {} if name == "ours" else {k: "" for k in os.environ if k.startswith("KVOFFLOAD_")}
    env = {k: v for k, v in os.environ.items() if k not in ours}
    env.pop("KVOFFLOAD_ENABLE", None)  # the command below is what switches it on
    env.pop("VLLM_USE_SIMPLE_KV_OFFLOAD", None)
    behind = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *behind])
    env.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})
    if small:
        env.update({"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                    "OMP_NUM_THREADS": "1"})  # fmt: skip
    if name == "ours":
        env.update({"KVOFFLOAD_CPU_GIB": f"{gib:g}", **settings})
    elif name == "simple":
        env["VLLM_USE_SIMPLE_KV_OFFLOAD"] = "1"
    elif name == "lmcache":
        env.update({"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": f"{gib:g}",
                    "LMCACHE_CHUNK_SIZE": "256", "LMCACHE_TRACK_USAGE": "false",
                    "PYTHONHASHSEED": "0"})  # fmt: skip
    return env


def command(mode: str, spec: str) -> list[str]:
    """The command line of a mode's process."""
    child = [sys.executable, "-m", CHILD, spec]
    if parse(mode)[0] == "ours":
        return [sys.executable, "-m", "kvoffload_patch", *child]
    return child


def engine_arguments(mode: str, gib: float) -> dict[str, Any]:
    """What a mode adds to the arguments of `vllm.LLM`."""
    name = parse(mode)[0]
    if name in CONNECTORS:
        return {"kv_offloading_size": gib, "kv_offloading_backend": "native",
                "disable_hybrid_kv_cache_manager": False}  # fmt: skip
    if name == "lmcache":
        return {"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}}
    return {}
