"""Copies that fail, on the CPU device: every n-th, after having left garbage where it should copy.

TEST_FAIL_LOADS and TEST_FAIL_STORES say which: ``3`` is every third. Without a variable, none.
"""

from __future__ import annotations

import os
from typing import Any

from kvoffload_patch.transfer.backends.torch import TorchBackend

# A byte that makes finite floats, so that only those who read it are disturbed.
_GARBAGE = 0x3F


def install() -> None:
    """Make copies of this process fail from now on, as the environment says."""
    for direction in ("load", "store"):
        every = int(os.environ.get(f"TEST_FAIL_{direction.upper()}S", "0"))
        if every:
            setattr(TorchBackend, direction, _failing(direction, every))


def _failing(direction: str, every: int) -> Any:
    as_made = getattr(TorchBackend, direction)
    calls = 0

    def copy(self: TorchBackend, gpu_block_ids: Any, cpu_slots: Any, *args: Any, **kw: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % every:
            return as_made(self, gpu_block_ids, cpu_slots, *args, **kw)
        if direction == "store":
            self._slots[list(cpu_slots)] = _GARBAGE
        else:
            for row in self._rows:
                row[list(gpu_block_ids)] = _GARBAGE
        raise OSError(f"{direction} {calls} is made to fail")

    return copy
