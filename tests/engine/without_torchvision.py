"""vLLM's files of models that name torchvision, where the CPU build was installed without it.

They name image processors that need it. What is played here makes none of those.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
# Files of Qwen3.5 with its classes for text alone, and those that draft.
_QWEN3_5 = {
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    "qwen3_5_mtp": ("Qwen3_5MTP", "Qwen3_5MoeMTP"),
}


@contextmanager
def importable() -> Iterator[None]:
    """Let files be imported that name it; it is not there behind that."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    for name in _NAMES:
        sys.modules[name] = ModuleType(name)
    sys.modules[_NAMES[-1]].functional = None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in _NAMES:
            del sys.modules[name]


def install() -> None:
    """Let vLLM have Qwen3.5 for text, whose file has the one that sees images as well."""
    from vllm import ModelRegistry

    with importable():
        for file, names in _QWEN3_5.items():
            module = importlib.import_module(f"vllm.model_executor.models.{file}")
            for name in names:
                ModelRegistry.register_model(name, getattr(module, name))
