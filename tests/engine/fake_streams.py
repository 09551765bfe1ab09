"""Streams and events that do nothing, for outputs that vLLM copies to the CPU on a CUDA stream.

On the CPU device these copies are made at once, so nothing has to be waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class Nothing:
    """A stream or an event: whatever is asked of it is done already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: True


def install() -> None:
    """Put them in the place of CUDA's, and of vLLM's own stand-ins, which know fewer methods."""
    if torch.cuda.is_available():
        return
    from vllm.v1.worker import cpu_model_runner

    _replace()
    as_made = cpu_model_runner._torch_cuda_wrapper

    @contextlib.contextmanager
    def wrapper() -> Iterator[None]:
        with as_made():
            _replace()
            yield

    cpu_model_runner._torch_cuda_wrapper = wrapper


def _replace() -> None:
    torch.Event = torch.cuda.Stream = torch.cuda.Event = Nothing
    torch.cuda.current_stream = torch.cuda.default_stream = Nothing
    torch.cuda.stream = contextlib.nullcontext
