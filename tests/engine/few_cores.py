"""What eager engines need not do on the CPU, where it takes longer than what is tested.

vLLM compiles single functions for them, such as the mask of a rank's part of the vocabulary, which
is seconds of a compiler in each rank of each engine. And ranks that wait for each other ask again
and again, on the cores of those that compute.
"""

from __future__ import annotations

import os
import time

# For processes that import PyTorch by themselves.
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
_PERIOD_S = 0.0003


def compile_nothing() -> None:
    """In this process, and in those that it starts."""
    import torch._dynamo

    os.environ.update(EAGER)
    torch._dynamo.config.disable = True


def replace_kernels_once() -> None:
    """In this process, for those that are forked from it.

    From 0.32 on each worker looks through all modules for Triton's kernels, to put others in their
    place. A module that is imported later finds those.
    """
    from vllm.platforms import current_platform

    kind = type(current_platform)  # the object itself says None to any name
    if hasattr(kind, "register_triton_kernel_overrides"):
        current_platform.register_triton_kernel_overrides()
        kind.register_triton_kernel_overrides = lambda *_: None


def wait_asleep() -> None:
    """In processes that are forked from this one."""
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = _sleep


def _sleep() -> None:
    time.sleep(_PERIOD_S)
