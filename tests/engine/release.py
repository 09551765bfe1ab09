"""What the installed vLLM can play on the CPU, read from its files: nothing of it is imported."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from importlib import metadata
from pathlib import Path

from scripts.release.installed import version

BLOCK = 128  # tokens of a KV block on the CPU, unless `block_size` says otherwise


@cache
def source(file: str) -> str:
    """Text of one of vLLM's files; empty if there is no such file."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return ""
    path = Path(spec.origin).parent / file
    return path.read_text(encoding="utf-8") if path.exists() else ""


def block_size() -> int:
    """Tokens of a block: up to 0.11.0 another size than 16 takes Intel's extension of PyTorch."""
    needs_extension = "if not ipex_available" in source("platforms/cpu.py")
    extension = importlib.util.find_spec("intel_extension_for_pytorch")
    return 16 if needs_extension and extension is None else BLOCK


def environment(ranks: int = 1) -> dict[str, str]:
    """Variables with which this release starts its V1 engine on the CPU, threads not bound.

    Args:
        ranks: of this machine, those of all its data-parallel engines.
    """
    needed = {"VLLM_CPU_OMP_THREADS_BIND": _unbound(ranks)}
    # Up to 0.10 the engine before V1 is the default on a CPU.
    if "VLLM_USE_V1" in source("envs.py"):
        needed["VLLM_USE_V1"] = "1"
    # 0.20 to 0.22 have a worker process even for one rank. Forked, it takes over what was imported
    # or, by `late_copies` and its kin, replaced.
    if 'if parallel_config.distributed_executor_backend == "uni":' in source("platforms/cpu.py"):
        needed["TEST_FORK_WORKERS"] = "1"
    # From 0.33 on the n-th data-parallel rank takes the n-th of these, which can be the same.
    if "assigned_node_ids" in source("utils/cpu_resource_utils.py"):
        needed["CPU_VISIBLE_MEMORY_NODES"] = ",".join(["0"] * ranks)
    return needed


def _unbound(ranks: int) -> str:
    later = source("utils/ompmultiprocessing.py")
    if later and "core ids={self.cpu_lists[i]}" in later:
        # 0.20 fails at "nobind", so each rank gets every core.
        return "|".join([f"0-{(os.cpu_count() or 1) - 1}"] * ranks)
    # Before there was "nobind", "all" said so for each rank.
    has_word = '"nobind"' in later + source("v1/worker/cpu_worker.py")
    return "nobind" if has_word else "|".join(["all"] * ranks)


def dtype() -> str:
    """The most exact one that the V1 engine takes: 0.9.1 knows no float32."""
    return "bfloat16" if "V1_SUPPORTED_DTYPES" in source("engine/arg_utils.py") else "float32"


def preloaded_names() -> dict[str, str]:
    """What 0.18 wants to read in LD_PRELOAD: faster libraries, which it does not bring along."""
    wants = 'check_preloaded_libs("libtcmalloc")' in source("v1/worker/cpu_worker.py")
    if not wants or "libtcmalloc" in source("platforms/cpu.py"):
        return {}
    return {
        "LD_PRELOAD": os.pathsep.join([os.environ.get("LD_PRELOAD", ""), "libtcmalloc", "libiomp"])
    }


def counts_external_hits() -> bool:
    """Whether vLLM counts tokens found beyond its own cache (from 0.11.1 on)."""
    return "vllm:external_prefix_cache_hits" in source("v1/metrics/loggers.py")


def tells_engines_apart() -> bool:
    """Whether data-parallel engines of a dense model are told that each is alone (from 0.14 on)."""
    return "parallel_config.data_parallel_index = dp_rank" in source("v1/engine/core.py")


def says_where_hits_came_from() -> bool:
    """Whether vLLM counts cached tokens by the memory that they were in (from 0.32 on)."""
    return '"vllm:prompt_tokens_cached_by_source"' in source("v1/metrics/loggers.py")


def keeps_all_on_the_gpu() -> str:
    """Why nothing leaves the GPU's cache while tests run; empty if it does."""
    only_said = '"num_gpu_blocks_override=%d", num_blocks, num_gpu_blocks_override)\n    return num'
    if only_said not in source("v1/core/kv_cache_utils.py"):
        return ""
    return f"vLLM {version()} says that it obeys --num-gpu-blocks-override, and does not"


def prefix_cache_metric() -> str:
    """How vLLM names its own cache's counters: 0.9.1 says `gpu` in them."""
    new = '"vllm:prefix_cache_queries"' in source("v1/metrics/loggers.py")
    return "vllm:prefix_cache" if new else "vllm:gpu_prefix_cache"


def takes_arguments_over_http() -> bool:
    """Whether a request over HTTP has a field for what plugins read (from 0.9.2 on)."""
    files = ("entrypoints/openai/completion/protocol.py", "entrypoints/openai/protocol.py")
    return any("vllm_xargs" in source(file) for file in files)


def needs_stats_each_step() -> bool:
    """Whether a step without outputs is an error of vLLM's in-process client (up to 0.11.0)."""
    return "assert outputs.scheduler_stats is not None" in source("v1/engine/llm_engine.py")


def no_async_scheduling() -> str:
    """Why asynchronous scheduling cannot be played on the CPU; empty if it can."""
    if not source("v1/core/sched/async_scheduler.py"):
        return f"vLLM {version()} has no asynchronous scheduling"
    if "assert isinstance(output, ModelRunnerOutput)" in source("v1/worker/cpu_worker.py"):
        return f"vLLM {version()} has a CPU worker that takes no asynchronous output"
    return ""


def no_second_runner() -> str:
    """Why runner V2 cannot be played on the CPU; empty if it can be tried."""
    if "use_v2_model_runner" in source("v1/worker/cpu_worker.py"):
        return ""
    return f"vLLM {version()} has no model runner V2 for the CPU"


def no_expert_records() -> str:
    """Why answers cannot say which experts computed a token of a hit in the tier; empty if so."""
    if "def max_cache_hit" in source("distributed/aux_output_connector/connector.py"):
        return no_second_runner()
    return f"vLLM {version()} does not know which blocks have records of experts"


def lacks_mamba2_kernels() -> bool:
    """Whether Mamba 2 leaves states behind within a step, as the CPU's kernels cannot (0.32)."""
    return "num_prefill_checkpoint_blocks" in source("model_executor/layers/mamba/mamba_mixer2.py")


def resets_when_it_sleeps() -> bool:
    """From 0.17 on the engine core resets its prefix cache itself when it falls asleep."""
    return "clear_prefix_cache = level >= 1" in source("v1/engine/core.py")


def no_sharded_blocks() -> str:
    """Why `sharded_attention` cannot be played; empty if it can be tried."""
    if "forward_includes_kv_cache_update: bool = False" in source(
        "v1/attention/backends/cpu_attn.py"
    ) and "num_reqs: int" in source("v1/worker/block_table.py"):
        return ""
    return f"vLLM {version()} has a CPU attention that the test's own cannot stand in for"


def facts() -> dict[str, str]:
    """What is installed, for a result's head."""
    import platform

    return {
        "release": version(),
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
    }
