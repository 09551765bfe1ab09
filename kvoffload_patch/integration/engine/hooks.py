"""Hooks on vLLM's engine classes: where a tier is attached, and where it is detached."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvoffload_patch.integration.engine.attach import attach, detach, refuse_v0
from kvoffload_patch.integration.engine.blocks.weights import changes_weights
from kvoffload_patch.integration.engine.ranks.ray_workers import pass_variables_on
from kvoffload_patch.integration.protocol import attached

logger = logging.getLogger("vllm.kvoffload_patch")

Wrapped = Callable[..., Any]


def init(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> None:
    """`EngineCore.__init__`: when it returns, executor, KV caches and scheduler exist."""
    try:
        pass_variables_on(_executor_class(*args, **kwargs))
    except Exception as error:  # noqa: BLE001 - workers that lack them say so when asked
        logger.warning(
            "kvoffload_patch: Ray's workers do not get our variables (%s); set them where Ray "
            "starts its workers.", error,
        )  # fmt: skip
    wrapped(*args, **kwargs)
    attach(instance, instance.vllm_config)


def init_v0(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> None:
    """`LLMEngine.__init__` of the engine before V1, which 0.10 still has.

    With VLLM_USE_V1=1 that name stands for V1's class.
    """
    if any(c.__module__ == "vllm.engine.llm_engine" for c in type(instance).__mro__):
        refuse_v0()
    wrapped(*args, **kwargs)


def shutdown(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """`EngineCore.shutdown`: before it, the workers still answer."""
    try:
        detach(instance)
    except Exception as error:  # noqa: BLE001 - vLLM's own shutdown must follow
        logger.warning(
            "kvoffload_patch: the CPU tier was not closed in order (%s); the end of each process "
            "gives its memory back.", error,
        )  # fmt: skip
    finally:  # also after a key while copies are waited for
        result = wrapped(*args, **kwargs)
    return result


def sleep(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """`EngineCore.sleep`: from level 1 on it resets the prefix cache, at once or later."""
    breaker = _breaker(instance)
    if breaker is None:
        return wrapped(*args, **kwargs)
    later = None
    breaker.sleep_begins(_level(*args, **kwargs))
    try:
        later = wrapped(*args, **kwargs)
    finally:
        if later is None:
            breaker.sleep_over()
        else:
            later.add_done_callback(breaker.sleep_over)
    return later


def collective_rpc(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """`EngineCore.collective_rpc`: a user's call of all workers, by which weights are updated."""
    breaker = _breaker(instance)
    if breaker is None or not changes_weights(_method(*args, **kwargs)):
        return wrapped(*args, **kwargs)
    try:
        return wrapped(*args, **kwargs)
    finally:  # it may have changed some of them before it raised
        breaker.weights_updated()


def add_lora(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """`EngineCore.add_lora`: a LoRA adapter is loaded before a request names it, or again."""
    breaker = _breaker(instance)
    if breaker is None:
        return wrapped(*args, **kwargs)
    # Before: its files may be written meanwhile, and some ranks may have it before one raises.
    breaker.lora_named(_lora_request(*args, **kwargs), to_be_loaded=True)
    return wrapped(*args, **kwargs)


def _breaker(core: Any) -> Any:
    """The tier of an engine, or None.

    Up to 0.17, and for producers of encoder outputs from 0.32 on, vLLM calls its workers before
    there is a scheduler.
    """
    scheduler = getattr(core, "scheduler", None)
    return None if scheduler is None else attached(scheduler)


def _executor_class(vllm_config: Any, executor_class: Any, *_: Any, **__: Any) -> Any:
    return executor_class


def _level(level: int = 1, *_: Any, **__: Any) -> int:
    return level


def _lora_request(lora_request: Any) -> Any:
    return lora_request


def _method(method: Any, *_: Any, **__: Any) -> Any:
    return method
