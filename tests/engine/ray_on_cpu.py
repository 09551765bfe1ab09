"""vLLM's CPU platform names no device to Ray, and refuses it; here it names the one that GPUs have.

Ray is told how many of these a node has, and looks at none. Up to 0.19 the platform puts vLLM's own
executor in the place of Ray's as well.
"""

from __future__ import annotations


def install() -> None:
    """Name it, and leave Ray's executor where it is asked for, in this process."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"
    as_made = CpuPlatform.check_and_update_config.__func__

    def check(cls: type, vllm_config: object) -> None:
        parallel = vllm_config.parallel_config
        asked = parallel.distributed_executor_backend
        as_made(cls, vllm_config)
        if asked == "ray":
            parallel.distributed_executor_backend = asked

    CpuPlatform.check_and_update_config = classmethod(check)
