"""Starts one real engine, plays scenarios on it, and prints what came out as JSON.

Run in a process of its own, by `engines.run`: ``driver.py SPEC``, where SPEC is JSON with
``engine`` (arguments of `vllm.LLM`), ``scenarios`` (names in `scenarios`), ``late`` (how late
copies happen, see `late_copies`; 0: at once; ``layers`` or ``deaf to N``: see `late_layers`) and
``way`` (see `engines.run`). ``driver.py --warm SOCKET`` is for `warm`: it imports vLLM, and forks a
process for each line that comes in by the file descriptor SOCKET, for an engine, or for a server
where a line has ``argv``, words behind ``vllm``; one with ``code`` is Python to run instead.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import socket
import sys
import time
import traceback
from typing import Any, NoReturn

import few_cores
import forking
import release
import ways

# Importing vLLM makes objects of which few are garbage, and collections that look at them all are a
# fifth of its time. Processes that are spawned from this one run this line, too.
gc.set_threshold(100_000, 50, 100)
# What an engine or a server imports when it is started.
_LATER = (
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.model_loader",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu.model_runner",
)
_UNFREEZE = gc.unfreeze
# What an environment variable has replaced before the engine is started.
_REPLACES = {
    "TEST_ALIGNED_DRAFTS": "aligned_drafts",
    "TEST_CANARY_FAULT": "failing_canary",
    "TEST_CLOCK": "jumping_clock",
    "TEST_GROWTH": "slow_growth",
    "TEST_HANG": "hung_copies",
    "TEST_KVCACHED": "kvcached_here",
    "TEST_STATE_KERNELS": "state_kernels",
    "TEST_LINEAR_KERNELS": "linear_kernels",
    "TEST_MAMBA2_KERNELS": "mamba2_kernels",
    "TEST_REPLACED": "replaced_points",
    "TEST_SHARDED_ATTENTION": "sharded_attention",
    "TEST_QWEN3_5": "without_torchvision",
    "TEST_RAY_ON_CPU": "ray_on_cpu",
    "TEST_SHM": "own_mounts",
    "TEST_SLEEP": "sleeping",
    "TEST_UNTIMED_KERNELS": "untimed_kernels",
}


def main() -> None:
    """Play what the command line says, or what comes down the pipe."""
    before_vllm()
    if sys.argv[1] == "--warm":
        warm_up()
        asked = forking.Forking(socket.socket(fileno=int(sys.argv[2]))).serve()
        if asked is None:
            _exit(0)
        spec = become(asked)
        if "argv" not in spec:
            _exit(_status_of(spec))
        few_cores.compile_nothing()
        run_command(spec["argv"])
        return
    play(json.loads(sys.argv[1]))
    if "TEST_LEAVES_THREADS" in os.environ:
        _exit(0)  # a neighbour's threads, LMCache's for one, keep Python from ending


def before_vllm() -> None:
    """What is to be done before any of vLLM is imported."""
    if "TEST_TRITON" in os.environ:
        import triton_on_cpu

        triton_on_cpu.install()


def warm_up() -> None:
    """Import all that can be, and leave it out of every later collection of garbage.

    A collection looks at each object, of which there are millions by then, and takes a copy of the
    memory that they lie in. vLLM takes back what was left out where it closes an engine, so that
    what it held can be collected; here its process ends next. ``TEST_COLLECTS`` leaves it that.
    """
    _import_vllm()
    for name in _LATER:
        with contextlib.suppress(Exception):  # another release has none, or not on the CPU
            importlib.import_module(name)
    few_cores.replace_kernels_once()
    gc.collect()
    gc.freeze()
    gc.unfreeze = _stay_frozen


def _stay_frozen() -> None:
    """What is done in place of taking back what was left out of collections."""


def run_command(words: list[str]) -> None:
    """Run ``vllm WORDS``, a server that forks its engine cores and workers.

    API servers are spawned: vLLM leaves no choice there. TEST_LATE: how late copies happen, see
    `late_copies`. TEST_HANG: see `hung_copies`.
    """
    if late := int(os.environ.get("TEST_LATE", "0")):
        _let_copies_be_late(late)
    if "TEST_HANG" in os.environ:
        import hung_copies

        hung_copies.install()
    change_platform(async_scheduling=False, fork_workers=True)
    sys.argv = ["vllm", *words]
    importlib.import_module("vllm.entrypoints.cli.main").main()


def _status_of(spec: dict[str, Any]) -> int:
    try:
        play(spec)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - it is printed, and is the status
        traceback.print_exc()
        return 1
    return 0


def _exit(status: int) -> NoReturn:
    """End as Python would, but for taking every module apart, which takes as long as a start."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _let_copies_be_late(how: int | str) -> None:
    layers, _, deaf_to = str(how).partition("deaf to ")
    if deaf_to or layers == "layers":
        import late_layers

        late_layers.install(int(deaf_to or -1))
    else:
        import late_copies

        late_copies.install(how)


def play(spec: dict[str, Any]) -> None:
    """Play, and print one line ``RESULT {...}``: a result for each scenario; or run ``code``."""
    if "code" in spec:
        exec(spec["code"], {})
        return
    if spec["way"] == "plugin":
        _leave_the_plugin_alone()
    if spec["late"]:
        _let_copies_be_late(spec["late"])
    for variable, module in _REPLACES.items():
        if variable in os.environ:
            importlib.import_module(module).install()
    asynchronous = bool(spec["engine"].get("async_scheduling"))
    if asynchronous or ways.chosen() or "TEST_FORK_WORKERS" in os.environ:
        # Forked workers have the streams, and do not import vLLM again.
        change_platform(asynchronous, fork_workers=True)
    if release.needs_stats_each_step():
        _allow_steps_without_output()
    _import_vllm()
    if "images" in spec["scenarios"] or "TEST_IMAGES" in os.environ:
        import images

        images.register()
    stage = _start(spec["engine"])
    import features
    import scenarios

    results = {}
    for name in spec["scenarios"]:
        begin = time.monotonic()
        results[name] = (getattr(scenarios, name, None) or getattr(features, name))(stage)
        print(f"{name}: {time.monotonic() - begin:.1f} s", file=sys.stderr)
    # In one write: another process may log between two, to the same pipe.
    sys.stdout.write(f"RESULT {json.dumps(results)}\n")
    sys.stdout.flush()


def _start(asked: dict[str, Any]) -> Any:
    import scenarios

    block = release.block_size()
    engine = {
        "skip_tokenizer_init": True,
        "num_gpu_blocks_override": 24 * release.BLOCK // block,
        **({"block_size": block} if block != release.BLOCK else {}),
        "enforce_eager": True,
        "max_model_len": 2048,
        "dtype": "float32",
        "seed": 0,
        "disable_log_stats": False,
        **asked,
    }
    for name in ("kv_transfer_config", "speculative_config"):
        if name in engine:
            engine[name] = json.loads(engine[name])
    if "kv_events_config" in engine:
        from vllm.config import KVEventsConfig

        engine["kv_events_config"] = KVEventsConfig(**json.loads(engine["kv_events_config"]))
    begin = time.monotonic()
    os.environ.update(release.preloaded_names())
    stage = scenarios.Stage(_engines(engine))
    stage.arguments = engine  # for one that is to be like it
    print(f"engine up after {time.monotonic() - begin:.0f} s", file=sys.stderr)
    if any(name.startswith(("TEST_FAIL_", "TEST_FLIP_")) for name in os.environ):
        import failing_copies

        failing_copies.install_on(stage)
    if "TEST_BREAK" in os.environ and stage.breaker is not None:
        import breaking_tier

        breaking_tier.install(stage.breaker)
    if "TEST_LOSE_STATES" in os.environ and stage.breaker is not None:
        import losing_states

        losing_states.install(stage.core)
    return stage


def _engines(engine: dict[str, Any]) -> Any:
    """A `vllm.LLM`, or what is asked like one."""
    if engine["enforce_eager"]:
        few_cores.compile_nothing()
    if engine.get("data_parallel_size", 1) > 1:
        from parallel_engines import ParallelEngines

        several = ParallelEngines(**engine)
        atexit.register(several.close)
        return several
    if engine.pop("prefill_decode", False):
        from prefill_decode import PrefillDecode

        return PrefillDecode(**engine)
    from vllm import LLM

    return LLM(**engine)


def _import_vllm() -> None:
    """Import what an engine needs, the model too.

    vLLM looks at a model's class in a process of its own, which imports all of vLLM for it, unless
    the class is registered.
    """
    from vllm import LLM, ModelRegistry  # noqa: F401
    from vllm.model_executor.models.llama import LlamaForCausalLM

    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)


def become(asked: dict[str, Any]) -> dict[str, Any]:
    os.setsid()
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)
    os.environ.update(asked["env"])
    if "TEST_COLLECTS" in os.environ:
        gc.unfreeze = _UNFREEZE
    spec: dict[str, Any] = asked["spec"]
    return spec


def _leave_the_plugin_alone() -> None:
    """Take the start-up file's hook out again, so that only vLLM's plugin entry point is left."""
    from kvoffload_patch._bootstrap import VLLMFinder

    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, VLLMFinder)]


def change_platform(async_scheduling: bool, fork_workers: bool) -> None:
    """vLLM's CPU platform settles both, whatever is asked for, or vLLM has decided before."""
    if async_scheduling or ways.chosen():
        import fake_streams

        fake_streams.install()
    from vllm.platforms.cpu import CpuPlatform

    as_made = CpuPlatform.check_and_update_config.__func__

    def check(cls: type, vllm_config: object) -> None:
        decided = getattr(vllm_config.scheduler_config, "async_scheduling", None)
        as_made(cls, vllm_config)
        if async_scheduling:
            vllm_config.scheduler_config.async_scheduling = True
        elif ways.chosen() and decided is not None:
            vllm_config.scheduler_config.async_scheduling = decided
        if ways.chosen():
            ways.say(bool(vllm_config.scheduler_config.async_scheduling))
        if fork_workers:
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check)
    if fork_workers:
        few_cores.wait_asleep()


def _allow_steps_without_output() -> None:
    """A step that only waits for a load gives none, and such a step has no statistics either."""
    from vllm.v1.engine.core_client import InprocClient

    as_made = InprocClient.get_output

    def get_output(self: Any) -> Any:
        outputs = as_made(self)
        if outputs.scheduler_stats is None:
            outputs.scheduler_stats = self.engine_core.scheduler.make_stats()
        return outputs

    InprocClient.get_output = get_output


if __name__ == "__main__":
    main()
