"""Hooks on vLLM's EngineCore: where scheduler and workers are both at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvoffload_patch.integration.attach import attach, detach, refuse_v0


def init(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> None:
    """`EngineCore.__init__`: when it returns, executor, KV caches and scheduler exist."""
    wrapped(*args, **kwargs)
    attach(instance, instance.vllm_config)


def init_v0(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> None:
    """`LLMEngine.__init__` of the engine before V1, which 0.10 still has.

    With VLLM_USE_V1=1 that name stands for V1's class.
    """
    if any(c.__module__ == "vllm.engine.llm_engine" for c in type(instance).__mro__):
        refuse_v0()
    wrapped(*args, **kwargs)


def shutdown(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """`EngineCore.shutdown`: before it, the workers still answer."""
    try:
        detach(instance)
    finally:
        result = wrapped(*args, **kwargs)
    return result
