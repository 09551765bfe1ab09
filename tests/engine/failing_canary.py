"""A start-up check that fails on one rank, the one that TEST_CANARY_FAULT names."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

from kvoffload_patch.integration.worker import rpc
from kvoffload_patch.transfer.backends.torch import TorchBackend


def install() -> None:
    """On that rank, what is loaded never arrives. Other processes than this must be forked."""
    open_rank, fault = rpc.open_rank, int(os.environ["TEST_CANARY_FAULT"])

    @functools.wraps(open_rank)  # the engine sends it by name
    def opened(worker: Any, *args: Any, **kwargs: Any) -> Any:
        if worker.rank == fault:
            TorchBackend.load = _load  # type: ignore[method-assign]
        return open_rank(worker, *args, **kwargs)

    rpc.open_rank = opened


def _load(*_: Any, **__: Any) -> Iterator[None]:
    yield
