"""A second KV-cache tier in CPU memory for an installed, unmodified vLLM.

Three ways switch it on: the start-up file `kvoffload_patch.pth` with KVOFFLOAD_ENABLE=1 in the
environment, the command `python -m kvoffload_patch vllm serve MODEL`, and vLLM's own plugin entry
point. Programs may also call `enable()` before they import vLLM. Importing this package imports
nothing else; `kvoffload_patch.config` lists every variable.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__", "enable", "status"]


def enable() -> None:
    """Switch on for this process and its children, and arm now; a second call does nothing.

    A refusal raises (`ConfigError` or `PatchRefused`), or is one line on stderr with
    KVOFFLOAD_STRICT=0. KVOFFLOAD_DISABLE=1 wins: then nothing happens.
    """
    from kvoffload_patch import _bootstrap

    _bootstrap.enable()


def status() -> dict[str, object]:
    """What is installed and whether it matches, without importing vLLM.

    Keys: `version`, `enabled`, `armed`, `refusal` (of this process), and `release`, `supported`,
    `points`, `verdict` ("ok" or one sentence) from the decision on the installed files.
    """
    from kvoffload_patch import _bootstrap

    return _bootstrap.status()
