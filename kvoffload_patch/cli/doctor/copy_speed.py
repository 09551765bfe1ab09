"""Run as a child: how fast bytes move between GPU and CPU memory, or within CPU memory.

A reading for people, best of a few copies; the tier times its own copies when it opens.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvoffload_patch.cli.doctor.child import answer

COPIED_BYTES, REPEATS = 256 << 20, 3


def main(where: str) -> None:
    """Answer with the speed of ``gpu``, or that of ``memory``."""
    answer(of_gpu() if where == "gpu" else of_memory())


def of_memory() -> dict[str, object]:
    """GB/s of one thread that copies within CPU memory."""
    source, target = memoryview(bytearray(COPIED_BYTES)), memoryview(bytearray(COPIED_BYTES))

    def copy() -> None:
        target[:] = source

    return {"memory": _gb_per_s(copy)}


def of_gpu() -> dict[str, object]:
    """The first GPU's name, and GB/s in each direction with pinned memory."""
    import torch

    host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")

    def timed(target: torch.Tensor, source: torch.Tensor) -> float:
        def copy() -> None:
            target.copy_(source)
            torch.cuda.synchronize()

        return _gb_per_s(copy)

    return {
        "gpu": torch.cuda.get_device_name(),
        "to_cpu": timed(host, device),
        "to_gpu": timed(device, host),
    }


def _gb_per_s(copy: Callable[[], None]) -> float:
    copy()  # pages are taken, and clocks rise
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        copy()
        best = min(best, time.perf_counter() - began)
    return round(COPIED_BYTES / best / 1e9, 2)
