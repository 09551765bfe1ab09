"""Copies that fail, on the CPU device: every n-th, after having left garbage where it should copy.

TEST_FAIL_LOADS and TEST_FAIL_STORES say which: ``3`` is every third. Without a variable, none.
After every n-th store of TEST_FLIP_STORES one bit of each of its blocks is another one. The step
TEST_FAIL_STEP raises. With TEST_FAIL_RANK or TEST_FLIP_RANK on that rank only. One load of
TEST_COMPARE_EVERY is compared with checksums.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from kvoffload_patch.integration.protocol import attached
from kvoffload_patch.transfer.backends.torch import TorchBackend
from kvoffload_patch.transfer.engine import CopyEngine

# A byte that makes finite floats, so that only those who read it are disturbed.
_GARBAGE = 0x3F


def install_on(stage: Any) -> None:
    """Make copies of an engine's ranks fail, wherever they run."""
    install()
    if every := int(os.environ.get("TEST_COMPARE_EVERY", "0")):
        comparing = attached(stage.core.scheduler).tier._admission.comparing
        comparing._parked_every = comparing._every = every
    executor = getattr(stage.core, "model_executor", None)
    if executor is not None and executor.parallel_config.world_size > 1:
        executor.collective_rpc(install)


def install(worker: Any = None) -> None:
    """Make copies of this process, or of a worker's, fail from now on, as the environment says."""
    for direction in ("load", "store"):
        every = int(os.environ.get(f"TEST_FAIL_{direction.upper()}S", "0"))
        if every:
            setattr(TorchBackend, direction, _failing(direction, every))
    if step := int(os.environ.get("TEST_FAIL_STEP", "0")):
        _fail_in(step)
    if flips := int(os.environ.get("TEST_FLIP_STORES", "0")):
        _flip_after_stores(flips)


def _is_on(only: str) -> bool:
    return only in ("", str(torch.distributed.get_rank()))


def _fail_in(step: int) -> None:
    as_made, calls, only = CopyEngine.begin_step, 0, os.environ.get("TEST_FAIL_RANK", "")

    def begin_step(self: CopyEngine, *args: Any) -> bool:
        nonlocal calls
        calls += 1
        if calls == step and _is_on(only):
            raise RuntimeError(f"step {step} is made to fail")
        return as_made(self, *args)

    CopyEngine.begin_step = begin_step  # type: ignore[method-assign]


def _flip_after_stores(every: int) -> None:
    as_made, calls, only = TorchBackend.store, 0, os.environ.get("TEST_FLIP_RANK", "")

    def store(self: TorchBackend, gpu_block_ids: Any, cpu_slots: Any, *args: Any, **kw: Any) -> Any:
        nonlocal calls
        yield from as_made(self, gpu_block_ids, cpu_slots, *args, **kw)
        calls += 1
        if calls % every == 0 and _is_on(only):
            # The highest bit of a float's exponent, of what is attended to and not of a key, which
            # may be attended to less then: the answer is another one.
            self._slots[list(cpu_slots), self._slots.shape[1] // 4 * 3 + 3] ^= 0x40

    TorchBackend.store = store  # type: ignore[method-assign]


def _failing(direction: str, every: int) -> Any:
    as_made = getattr(TorchBackend, direction)
    calls, only = 0, os.environ.get("TEST_FAIL_RANK", "")

    def copy(self: TorchBackend, gpu_block_ids: Any, cpu_slots: Any, *args: Any, **kw: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % every or not _is_on(only):
            return as_made(self, gpu_block_ids, cpu_slots, *args, **kw)
        if direction == "store":
            self._slots[list(cpu_slots)] = _GARBAGE
        else:
            for row in self._rows:
                row[list(gpu_block_ids)] = _GARBAGE
        raise OSError(f"{direction} {calls} is made to fail")

    return copy
