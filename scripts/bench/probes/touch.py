"""python scripts/bench touch [--gib 4] [--threads 1,2,4] [--json FILE]

Taking pages of CPU memory in the background, and what that does to a thread that maps memory.

Three ways: a tier's threads, which look up the memory available meanwhile, with huge pages; with
and without these, MADV_POPULATE_WRITE in steps of 32 and 2 MiB, and page faults
(`kvoffload_patch.transfer.memory.mapping.touch`). Meanwhile another thread maps and unmaps 1 MiB,
as loading a model and capturing CUDA graphs do all the time, and runs Python, as compiling the
model does: how many times as long as alone. Says how much of the memory the kernel took as huge
pages, and with a CUDA GPU what the driver takes to register it, piece by piece as a tier does. What
the first row takes, a virtual machine may never have had before; the others find again what it has
had.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvoffload_patch.memory import available
from kvoffload_patch.transfer.device import device_of
from kvoffload_patch.transfer.memory.mapping import GIB, HostMapping, advise, touch
from kvoffload_patch.transfer.tuning import PIECE_BYTES
from scripts.bench import arguments
from scripts.bench.common import cell, machine, quantile, say, table, write_json

MIB = 1 << 20
STEP = 32 * MIB
FIRST, TIER = "faults, the first memory", "a tier's threads"
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


def huge_bytes(smaps: str, address: int) -> int:
    """Bytes in huge pages of the mapping at an address, by the text of /proc/PID/smaps."""
    inside = False
    for line in smaps.splitlines():
        name, _, value = line.partition(" ")
        begin, dash, end = name.partition("-")
        if dash and not name.endswith(":"):
            inside = int(begin, 16) <= address < int(end, 16)
        elif inside and name == "AnonHugePages:":
            return int(value.split()[0]) << 10
    return 0


def registering(memory: torch.Tensor) -> list[float]:
    """Milliseconds that the driver takes to register each whole piece; none without a CUDA GPU."""
    if not torch.cuda.is_available():
        return []
    registrar = device_of(torch.device("cuda", 0)).registrar()
    registrar.enter()
    first, pieces = memory.data_ptr(), memory.numel() // PIECE_BYTES
    times, begins = [], [first + at * PIECE_BYTES for at in range(pieces)]
    for begin in begins:
        began = time.perf_counter()
        error = registrar.register(begin, PIECE_BYTES)
        times.append(1000 * (time.perf_counter() - began))
        if error:
            raise SystemExit(f"error: expected memory that the driver registers, found {error}.")
    for begin in begins:
        registrar.unregister(begin)
    return times


def map_and_unmap() -> float:
    """Seconds that mapping and unmapping 1 MiB takes."""
    began = time.perf_counter()
    address = _libc.mmap(
        None, MIB, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    _libc.munmap(address, MIB)
    return time.perf_counter() - began


def run_python() -> float:
    """Seconds of about a millisecond's work that makes objects and throws them away."""
    began = time.perf_counter()
    for i in range(2000):
        {i: [str(i), (i, began)]}.popitem()
    return time.perf_counter() - began


def steps_of(
    take: Callable[[torch.Tensor], None], memory: torch.Tensor, threads: int
) -> Callable[[], bool]:
    """Take it step by step on so many threads; says whether they are still at it."""
    steps, lock = iter(range(0, memory.numel(), STEP)), threading.Lock()

    def run() -> None:
        while True:
            with lock:
                begin = next(steps, None)
            if begin is None:
                return
            take(memory[begin : begin + STEP])

    runners = [threading.Thread(target=run) for _ in range(threads)]
    for runner in runners:
        runner.start()
    return lambda: any(runner.is_alive() for runner in runners)


def begun(
    take: Callable[[torch.Tensor], None] | None, nbytes: int, threads: int, huge: bool
) -> tuple[torch.Tensor, Callable[[], bool]]:
    """Memory that is taken from now on, by a tier for None, and whether that goes on."""
    if take is not None:
        memory = fresh(nbytes, huge)
        return memory, steps_of(take, memory, threads)
    mapping = HostMapping(nbytes, None, lambda: available().nbytes, threads=threads)
    mapping.toucher.start(nbytes)  # until the mapping is dropped
    return mapping.memory, lambda: mapping.toucher.touched < nbytes and not mapping.toucher.ended


def measure(
    take: Callable[[torch.Tensor], None] | None, nbytes: int, threads: int, huge: bool
) -> dict[str, Any]:
    """GiB/s and milliseconds of mapping beside it; then GiB/s beside Python, which takes longer."""
    began = time.perf_counter()
    memory, goes_on = begun(take, nbytes, threads, huge)
    waits = [1000 * map_and_unmap()]
    while goes_on():
        waits.append(1000 * map_and_unmap())
        time.sleep(0.0005)
    seconds = time.perf_counter() - began
    found = {
        "huge_share": huge_bytes(Path("/proc/self/smaps").read_text(), memory.data_ptr()) / nbytes,
        "register_ms": registering(memory),
        "gib_per_s": nbytes / GIB / seconds,
        "map_mean_ms": sum(waits) / len(waits),
        "map_p99_ms": quantile(waits, 0.99),
        "map_max_ms": max(waits),
    }
    del memory
    alone, began = [run_python() for _ in range(200)], time.perf_counter()
    memory, goes_on = begun(take, nbytes, threads, huge)
    beside = [run_python()]
    while goes_on():
        beside.append(run_python())
    seconds = time.perf_counter() - began
    found["gib_per_s_beside_python"] = nbytes / GIB / seconds
    found["python_times"] = statistics.mean(beside) / statistics.mean(alone)
    return found


def report(cells: list[dict[str, Any]]) -> str:
    """A line for each way, with huge pages and without."""
    rows = [["way", "threads", "pages", "so many huge", "GiB/s", "mapping 1 MiB: mean", "p99",
             "max, ms", "registering 32 MiB, ms", "Python beside it, times as long",
             "GiB/s then"]]  # fmt: skip
    for found in cells:
        rows.append([
            found["way"], str(found["threads"]), "2 MiB" if found["huge"] else "4 KiB",
            f"{100 * found['huge_share']:.0f} %", f"{found['gib_per_s']:.2f}",
            *(f"{found[f'map_{kind}_ms']:.3f}" for kind in ("mean", "p99", "max")),
            cell(found["register_ms"]), f"{found['python_times']:.2f}",
            f"{found['gib_per_s_beside_python']:.2f}",
        ])  # fmt: skip
    return table(rows)


def main() -> None:
    """Measure all, in turn; print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=arguments.positive, default=4.0)
    parser.add_argument("--threads", type=arguments.wholes(1), default="2")
    parser.add_argument("--json", type=arguments.written)
    args = parser.parse_args()
    ways = {
        "populate, 32 MiB": populate(STEP), "populate, 2 MiB": populate(2 * MIB), "faults": touch
    }  # fmt: skip
    counts = args.threads
    chosen = [
        (name, threads, huge) for huge in (True, False) for threads in counts for name in ways
    ]
    cells = []
    tiers = [(TIER, threads, True) for threads in counts]
    for name, threads, huge in [(FIRST, max(counts), True), *tiers, *chosen]:
        take = None if name == TIER else ways.get(name, touch)
        found = measure(take, int(args.gib * GIB), threads, huge)
        cells.append({"way": name, "threads": threads, "huge": huge, **found})
    say(report(cells))
    if args.json:
        write_json(args.json, {"machine": machine(), "gib": args.gib, "cells": cells})
