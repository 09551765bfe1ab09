"""vLLM's CPU platform names no device to Ray, and refuses it; here it names the one that GPUs have.

Ray is told how many of these a node has, and looks at none.
"""

from __future__ import annotations


def install() -> None:
    """Name it, in this process."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"
