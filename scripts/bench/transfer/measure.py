"""How `bench transfer` measures: wall time of a transfer, host time, and matmuls beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from scripts.bench.common import summary
from scripts.bench.transfer.setup import Mover, Ways

NAP_S = 0.00005
MATMUL = 8192


class Start:
    """A transfer that has been started: host seconds that starting it took, and when it ends."""

    def __init__(self, host_s: float, done: Callable[[], bool]) -> None:
        self.host_s = host_s
        self.done = done


Transfer = Callable[[], Start]


def by_engine(mover: Mover, kind: str, moves: Ways) -> Transfer:
    """The transfer that a plan stands for."""

    def start() -> Start:
        plan = mover.plan(kind, moves)
        began = time.perf_counter()
        mover.engine.begin_step(plan)
        mover.engine.end_step()
        return Start(time.perf_counter() - began, mover.done)

    return start


class Memcpy:
    """Plain copies of one big pinned buffer for each direction: the limit of the bus."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

        def pair() -> tuple[torch.Tensor, torch.Tensor]:
            there = torch.randint(0, 1 << 62, (nbytes // 8,), device=device)
            return torch.empty(nbytes // 8, dtype=torch.int64, pin_memory=self._cuda), there

        self._up, self._down = pair(), pair()
        for host, there in (self._up, self._down):
            host.copy_(there)
        self._streams = [torch.cuda.Stream() for _ in range(2)] if self._cuda else []

    def transfer(self, kind: str) -> Transfer:
        """``store``, ``load`` or ``both``."""
        copies = []
        if kind != "store":
            copies.append((0, self._up[1], self._up[0]))
        if kind != "load":
            copies.append((1, self._down[0], self._down[1]))

        def start() -> Start:
            began = time.perf_counter()
            ends = [self._copy(*copy) for copy in copies]
            took = time.perf_counter() - began
            return Start(took, lambda: all(end is None or end.query() for end in ends))

        return start

    def _copy(self, number: int, target: torch.Tensor, source: torch.Tensor) -> Any:
        if not self._cuda:
            target.copy_(source)
            return None
        with torch.cuda.stream(self._streams[number]):
            target.copy_(source, non_blocking=True)
            end = torch.cuda.Event()
            end.record()
        return end


def wait(started: Start) -> None:
    """Sleep until the transfer has ended; leaves the interpreter to the thread that copies."""
    while not started.done():
        time.sleep(NAP_S)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


FIGURES = ("gb_s", "host_us", "cpu_ms", "seconds")  # that `speed` takes


def speed(transfer: Transfer, nbytes: int, repeats: int) -> dict[str, Any]:
    """GB/s (all bytes that cross the bus), microseconds that starting takes, CPU milliseconds.

    ``cpu_ms`` is CPU time of all threads of this process from start to end.
    """
    rates, host, cpu, seconds = [], [], [], []
    for repeat in range(repeats + 1):
        _synchronize()
        busy, began = time.process_time(), time.perf_counter()
        started = transfer()
        wait(started)
        took, busy = time.perf_counter() - began, time.process_time() - busy
        if repeat:  # the first one warms up
            rates.append(nbytes / took / 1e9)
            host.append(started.host_s * 1e6)
            cpu.append(busy * 1e3)
            seconds.append(took)
    return dict(zip(FIGURES, map(summary, (rates, host, cpu, seconds))))


class Matmuls:
    """A stream of bf16 products, and what a transfer meanwhile does to it."""

    def __init__(self) -> None:
        size = (MATMUL, MATMUL)
        self._a, self._b = (torch.randn(size, device="cuda").bfloat16() for _ in range(2))
        self._out = torch.empty(size, dtype=torch.bfloat16, device="cuda")
        self._stream = torch.cuda.Stream()
        self.run(10)
        self.each_s = self.run(20)() / 20

    def run(self, count: int) -> Callable[[], float]:
        """Start; calling the result waits and says how many seconds the products took."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            begin.record()
            for _ in range(count):
                torch.mm(self._a, self._b, out=self._out)
            end.record()

        def seconds() -> float:
            end.synchronize()
            return begin.elapsed_time(end) / 1000

        return seconds

    def beside(self, transfer: Transfer, transfer_s: float, repeats: int) -> dict[str, Any]:
        """How many times as long the products take while a transfer runs.

        There are so many of them that they are over before it: the transfer runs all the time.
        ``covered`` is the share of their time for which that held; below 1 the ratio is diluted.
        """
        count = max(1, int(0.75 * transfer_s / self.each_s))
        ratios, covered = [], []
        for repeat in range(repeats + 1):
            _synchronize()
            alone = self.run(count)()
            _synchronize()
            products = self.run(count)
            began = time.perf_counter()
            started = transfer()
            wait(started)
            transferred = time.perf_counter() - began
            meanwhile = products()
            if repeat:
                ratios.append(meanwhile / alone)
                covered.append(min(1.0, transferred / meanwhile))
        return {"ratio": summary(ratios), "covered": summary(covered), "products": count}
