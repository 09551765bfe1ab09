"""In processes that Ray starts: `ray_on_cpu`, as soon as vLLM has its CPU platform."""

import os

if "TEST_RAY_ON_CPU" in os.environ:
    import wrapt

    wrapt.register_post_import_hook(
        lambda module: setattr(module.CpuPlatform, "ray_device_key", "GPU"), "vllm.platforms.cpu"
    )
