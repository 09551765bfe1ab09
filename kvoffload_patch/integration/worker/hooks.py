"""Hooks on vLLM's model runners (V1, V2, and the CPU ones derived from them)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvoffload_patch.integration.protocol import PLAN, attached
from kvoffload_patch.integration.worker.lost import check_reads_nothing
from kvoffload_patch.integration.worker.memory import begin_early

Wrapped = Callable[..., Any]


def load_model(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """`GPUModelRunner.load_model`: CPU memory is taken beside it."""
    compiling = begin_early(instance)
    result = wrapped(*args, **kwargs)
    if compiling is not None:
        compiling.join()
    return result


def execute_model(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """`GPUModelRunner.execute_model`: the forward pass.

    It returns None when `sample_tokens` is still to come. The store is submitted after that,
    because a drafting model writes its KV there.
    """
    tier, step = attached(instance), _scheduler_output(*args, **kwargs)
    if tier is None or _is_dummy(*args, **kwargs):
        if tier is None:
            check_reads_nothing(getattr(step, PLAN, None))
        return wrapped(*args, **kwargs)
    tier.begin_step(getattr(step, PLAN, None), step)
    try:
        output = wrapped(*args, **kwargs)
    except BaseException:
        tier.step_raised()
        raise
    tier.end_forward()
    return output if output is None else tier.end_step(output)


def sample_tokens(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
    """`GPUModelRunner.sample_tokens`: the end of a step."""
    try:
        output = wrapped(*args, **kwargs)
    except BaseException:
        if (tier := attached(instance)) is not None:
            tier.step_raised()
        raise
    tier = attached(instance)
    return output if tier is None else tier.end_step(output)


def _is_dummy(
    scheduler_output: Any,
    intermediate_tensors: Any = None,
    dummy_run: bool = False,
    *_: Any,
    **__: Any,
) -> bool:
    """Whether runner V2 only warms up or keeps other ranks company: nothing is planned for that."""
    return dummy_run


def _scheduler_output(scheduler_output: Any, *_: Any, **__: Any) -> Any:
    return scheduler_output
