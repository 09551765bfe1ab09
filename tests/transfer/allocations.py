"""Refuses what takes memory by torch, and counts what was taken on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transfer.fake_cuda import FakeCuda


class NoAllocations(TorchDispatchMode):
    """While it is entered, an operation whose result lies in other memory than its arguments fails.

    Args:
        cuda: its work is done later, on the device: what that takes does not count.
    """

    def __init__(self, cuda: FakeCuda | None = None) -> None:
        super().__init__()
        self._on_device = False
        if cuda is not None:
            cuda.run_one = self._let(cuda.run_one)  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._on_device:
            taken = _storages(result) - _storages((args, kwargs))
            assert not taken, f"{func} takes memory"
        return result

    def guard(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, within this mode."""

        def guarded(*args: Any, **kwargs: Any) -> Any:
            with self:
                return call(*args, **kwargs)

        return guarded

    def _let(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def on_device(*args: Any, **kwargs: Any) -> Any:
            before, self._on_device = self._on_device, True
            try:
                return call(*args, **kwargs)
            finally:
                self._on_device = before

        return on_device


def _storages(of: Any) -> set[int]:
    tensors = [leaf for leaf in tree_leaves(of) if isinstance(leaf, torch.Tensor)]
    return {t.untyped_storage().data_ptr() for t in tensors if t.untyped_storage().nbytes()}


def taken_on_the_gpu() -> dict[str, Any]:
    """Counters of torch's allocators, of the device's memory and of pinned memory."""
    found = {"device": torch.cuda.memory_stats()["allocation.all.allocated"]}
    pinned = getattr(torch.cuda, "host_memory_stats", dict)()  # later releases of torch have it
    return {**found, **{name: n for name, n in pinned.items() if "time" not in name}}
