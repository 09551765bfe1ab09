"""Starts one real engine, plays scenarios on it, and prints what came out as JSON.

Run in a process of its own, by `engines.run`: ``driver.py SPEC``, where SPEC is JSON with
``engine`` (arguments of `vllm.LLM`), ``scenarios`` (names in `scenarios`), ``late`` (how late
copies happen, see `late_copies`; 0: at once; ``layers`` or ``deaf to N``: see `late_layers`) and
``door`` (see `engines.run`).
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Play, and print one line ``RESULT {...}``: a result for each scenario."""
    spec = json.loads(sys.argv[1])
    if isinstance(spec["late"], str):
        import late_layers

        deaf_to = spec["late"].partition("deaf to ")[2]
        late_layers.install(int(deaf_to or -1))
    elif spec["late"]:
        import late_copies

        late_copies.install(spec["late"])
    if spec["engine"].get("async_scheduling"):
        _allow_async_scheduling()
    if spec["door"] == "plugin":
        _shut_the_other_doors()
    import scenarios
    from vllm import LLM

    engine = {
        "skip_tokenizer_init": True,
        "num_gpu_blocks_override": 24,
        "enforce_eager": True,
        "max_model_len": 2048,
        "dtype": "float32",
        "seed": 0,
        "disable_log_stats": False,
        **spec["engine"],
    }
    begin = time.monotonic()
    stage = scenarios.Stage(LLM(**engine))
    print(f"engine up after {time.monotonic() - begin:.0f} s", file=sys.stderr)
    if any(name.startswith("TEST_FAIL_") for name in os.environ):
        import failing_copies

        failing_copies.install()
    results = {}
    for name in spec["scenarios"]:
        begin = time.monotonic()
        results[name] = getattr(scenarios, name)(stage)
        print(f"{name}: {time.monotonic() - begin:.1f} s", file=sys.stderr)
    print("RESULT " + json.dumps(results), flush=True)


def _shut_the_other_doors() -> None:
    """Take the start-up file's hook out again, so that only vLLM's plugin entry point is left."""
    from kvoffload_patch._bootstrap import VLLMFinder

    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, VLLMFinder)]


def _allow_async_scheduling() -> None:
    """vLLM's CPU platform turns asynchronous scheduling off whatever is asked for."""
    from vllm.platforms.cpu import CpuPlatform

    as_made = CpuPlatform.check_and_update_config.__func__

    def keep_asked_for(cls: type, vllm_config: object) -> None:
        as_made(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(keep_asked_for)


if __name__ == "__main__":
    main()
