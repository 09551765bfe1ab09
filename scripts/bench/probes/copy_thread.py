"""python scripts/bench copy_thread [--steps 60] [--json FILE]

What enqueuing copies beside a step costs the step, without a GPU: the copy engine and its thread
as they are, over streams and events that only keep time. A step is launched as thousands of short
calls that give Python's lock up, as PyTorch's do; other threads that want the lock get in between.

  alone     no copies
  decode    each step stores one slice
  joining   each step stores one slice; parked loads keep the bus busy
  prefill   each step stores 32 slices, and takes the device 100 ms

Times are what launching takes, in milliseconds of wall time, in turns with `alone`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from kvoffload_patch.links import LOAD, STORE, Link
from kvoffload_patch.plan import Transfer, TransferPlan
from kvoffload_patch.transfer import device as devices
from kvoffload_patch.transfer.engine import CopyEngine
from scripts.bench import arguments
from scripts.bench.common import machine, quantile, say, table, write_json

CALLS = 2000
STORE_SLICE_S, LOAD_SLICE_S = 0.0006, 0.0012  # 32 and 64 MiB by DMA


class Stream:
    """When what a stream has been given will be done."""

    def __init__(self, **_: Any) -> None:
        self.end = 0.0

    def take(self, seconds: float) -> None:
        """Work of so many seconds."""
        self.end = max(self.end, time.perf_counter()) + seconds

    def wait_event(self, event: Event) -> None:
        """Go on after it."""
        self.end = max(self.end, event.at)

    def wait_stream(self, other: Stream) -> None:
        """Go on after all that it has."""
        self.end = max(self.end, other.end)

    def synchronize(self) -> None:
        """Sleep until all is done."""
        time.sleep(max(0.0, self.end - time.perf_counter()))


class Event:
    """A moment on a stream; done if it was never recorded."""

    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self, stream: Stream) -> None:
        """After all that the stream has now."""
        self.at = stream.end

    def query(self) -> bool:
        """Whether it has passed."""
        return time.perf_counter() >= self.at

    def synchronize(self) -> None:
        """Sleep until it has."""
        time.sleep(max(0.0, self.at - time.perf_counter()))


class Backend:
    """Copies that take time, and nothing else: a slice for each block."""

    name = "timed"
    groups = ()

    def load(self, ids: Any, _: Any, streams: Any, compared: bool = False) -> Iterator[None]:
        """Slices of a load."""
        for _ in ids:
            streams.blocks.take(LOAD_SLICE_S)
            yield

    def store(self, ids: Any, _: Any, streams: Any) -> Iterator[None]:
        """Slices of a store."""
        for _ in ids:
            streams.bus.wait_stream(streams.blocks)
            streams.bus.take(STORE_SLICE_S)
            yield


class Steps:
    """Steps of one kind, one after the other.

    Args:
        stores: slices that each step stores.
        loads: slices of parked loads that are begun whenever the bus has less to do.
        device_s: seconds that a step takes the device.
    """

    def __init__(self, stores: int, loads: int, device_s: float) -> None:
        self._stores, self._loads = stores, loads
        self._device_s = device_s
        self._compute = Stream()
        self._tickets = {LOAD: 0, STORE: 0}
        self._values = torch.zeros(64)
        device = SimpleNamespace(
            is_host=False, use=lambda: None, new_event=Event,
            new_stream=lambda priority=0: Stream(), current_stream=lambda: self._compute,
        )  # fmt: skip
        self._patch = mock.patch.dict(devices._KINDS, {"cuda": lambda _: device})
        self._patch.start()
        layout: Any = SimpleNamespace(device=torch.device("cuda"), block_bytes=32 << 20)
        backend: Any = Backend()
        self._engine = CopyEngine(layout, backend)

    def _transfer(self, link: Link, slices: int) -> tuple[Transfer, ...]:
        self._tickets[link] += 1
        ids = tuple(range(slices))
        return (Transfer(self._tickets[link], *link, ids, ids),)

    def _plan(self) -> TransferPlan:
        progress, loads, stores = self._engine.poll(), (), ()
        if self._loads and self._tickets[LOAD] - progress.done_on(LOAD) < 2:
            loads = self._transfer(LOAD, self._loads)
        if self._stores:
            stores = self._transfer(STORE, self._stores)
        return TransferPlan(loads, stores, (), progress.done)

    def step(self) -> float:
        """One step; milliseconds that launching it took."""
        self._engine.begin_step(self._plan())
        began = time.perf_counter()
        self._compute.take(self._device_s)
        launch_calls(self._values)
        took = time.perf_counter() - began
        self._engine.end_step()
        # The tokens of the step before it are waited for.
        time.sleep(max(0.0, self._compute.end - self._device_s - time.perf_counter()))
        return 1000 * took

    def close(self) -> None:
        """End the thread."""
        self._engine.close()
        self._patch.stop()


def launch_calls(values: torch.Tensor) -> None:
    """Short calls, each of which gives Python's lock up."""
    for _ in range(CALLS):
        values.add_(1)


def alone(steps: int) -> list[float]:
    """Launching without anything beside it."""
    values, found = torch.zeros(64), []
    for _ in range(steps):
        began = time.perf_counter()
        launch_calls(values)
        found.append(1000 * (time.perf_counter() - began))
    return found


KINDS = {
    "decode": (1, 0, 0.006),
    "joining": (1, 16, 0.008),
    "prefill": (32, 0, 0.1),
}


def main() -> None:
    """Measure all, in turns; print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=arguments.whole(1), default=60)
    parser.add_argument("--turns", type=arguments.whole(1), default=3)
    parser.add_argument("--json", type=arguments.written)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"alone": [], **{kind: [] for kind in KINDS}}
    for _ in range(args.turns):
        found["alone"] += alone(args.steps)
        for kind, how in KINDS.items():
            steps = Steps(*how)
            try:
                for _ in range(args.steps):
                    found[kind].append(steps.step())
            finally:
                steps.close()
    rows = [["", "median", "p90", "over alone"]]
    base = quantile(found["alone"], 0.5)
    for kind, times in found.items():
        median = quantile(times, 0.5)
        rows.append([kind, f"{median:.2f}", f"{quantile(times, 0.9):.2f}", f"{median / base:.2f}"])
    say(table(rows))
    write_json(args.json, {"machine": machine(), "steps": args.steps, "launch_ms": found})
