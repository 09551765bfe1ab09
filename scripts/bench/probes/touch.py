"""python scripts/bench touch [--gib 4] [--threads 1,2,4] [--json FILE]

Taking pages of CPU memory in the background, and what that does to a thread that maps memory.

Two ways, with huge pages and without: MADV_POPULATE_WRITE in steps of 32 and 2 MiB, and page faults
(`kvoffload_patch.transfer.memory.mapping.touch`). Meanwhile another thread maps and unmaps 1 MiB,
as loading a model and capturing CUDA graphs do all the time.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvoffload_patch.transfer.memory.mapping import GIB, advise, touch
from scripts.bench.common import machine, quantile, say, table, write_json

MIB = 1 << 20
STEP = 32 * MIB
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_HUGE_PAGE = 2 * MIB

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def populate(step: int) -> Callable[[torch.Tensor], None]:
    """MADV_POPULATE_WRITE, so many bytes in a call."""

    def take(memory: torch.Tensor) -> None:
        for begin in range(0, memory.numel(), step):
            nbytes = min(step, memory.numel() - begin)
            advise(memory.data_ptr() + begin, nbytes, _POPULATE_WRITE)

    return take


def fresh(nbytes: int, huge: bool) -> torch.Tensor:
    """Memory without a page, ``uint8 [nbytes]``."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapped = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=flags)
    mapped.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    flat = torch.frombuffer(mapped, dtype=torch.uint8)
    begin = -flat.data_ptr() % _HUGE_PAGE
    return flat[begin : begin + nbytes]


def map_and_unmap() -> float:
    """Seconds that mapping and unmapping 1 MiB takes."""
    began = time.perf_counter()
    address = _libc.mmap(
        None, MIB, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    _libc.munmap(address, MIB)
    return time.perf_counter() - began


def measure(
    take: Callable[[torch.Tensor], None], nbytes: int, threads: int, huge: bool
) -> dict[str, Any]:
    """GiB/s, and milliseconds of mapping beside it."""
    memory = fresh(nbytes, huge)
    steps, lock = iter(range(0, nbytes, STEP)), threading.Lock()

    def run() -> None:
        while True:
            with lock:
                begin = next(steps, None)
            if begin is None:
                return
            take(memory[begin : begin + STEP])

    runners = [threading.Thread(target=run) for _ in range(threads)]
    began, waits = time.perf_counter(), []
    for runner in runners:
        runner.start()
    while any(runner.is_alive() for runner in runners):
        waits.append(1000 * map_and_unmap())
        time.sleep(0.0005)
    seconds = time.perf_counter() - began
    return {
        "gib_per_s": nbytes / GIB / seconds,
        "map_mean_ms": sum(waits) / len(waits),
        "map_p99_ms": quantile(waits, 0.99),
        "map_max_ms": max(waits),
    }


def main() -> None:
    """Measure all, in turn; print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--threads", default="2")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ways = {
        "populate, 32 MiB": populate(STEP), "populate, 2 MiB": populate(2 * MIB), "faults": touch
    }  # fmt: skip
    cells = []
    for huge in (True, False):
        for threads in map(int, args.threads.split(",")):
            for name, take in ways.items():
                found = measure(take, int(args.gib * GIB), threads, huge)
                cells.append({"way": name, "threads": threads, "huge": huge, **found})
    rows = [["way", "threads", "pages", "GiB/s", "mapping 1 MiB: mean", "p99", "max, ms"]]
    for cell in cells:
        times = [f"{cell[f'map_{kind}_ms']:.3f}" for kind in ("mean", "p99", "max")]
        pages = "2 MiB" if cell["huge"] else "4 KiB"
        speed = f"{cell['gib_per_s']:.2f}"
        rows.append([cell["way"], str(cell["threads"]), pages, speed, *times])
    say(table(rows))
    if args.json:
        write_json(args.json, {"machine": machine(), "gib": args.gib, "cells": cells})
