"""python scripts/bench beside [--json FILE] [--repeats 12]

What a step takes longer while a load crosses the bus, on one CUDA GPU.

The step is a CUDA graph of matrix products with few rows, which read 16 GiB of weights as a step of
decodes does. It is played alone and beside 1 GiB on its way from pinned memory, in pieces on two
streams in turn as the staged backend enqueues them: with nothing before it, and behind a copy of
its inputs (64 KiB, pinned). And what a launch costs the host, with copies and without. Ends with
status 2 where there is no CUDA GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from scripts.bench import arguments
from scripts.bench.common import GIB, lacks_cuda, machine, say, summary, table, write_json
from scripts.bench.probes.copy_queue import UP, enqueue, new_copy, spread
from scripts.bench.transfer.report import size

PIECE_BYTES = (128 << 20, 32 << 20, 16 << 20, 4 << 20)
INPUT_BYTES = 64 << 10
WEIGHTS, WIDTH, ROWS = 64, 8192, 8  # matrices of WIDTH x 2 WIDTH, two bytes each
LAUNCHES = 500


class Step:
    """The graph, what may come before it, and the traffic beside it."""

    def __init__(self, device: torch.device) -> None:
        self._traffic = new_copy(UP, GIB, device)
        self._inputs = new_copy(UP, INPUT_BYTES, device)
        self._bus = [torch.cuda.Stream(device, priority=-1) for _ in range(2)]
        self._stream = torch.cuda.Stream(device)
        self._small = torch.ones(1024, device=device)
        options = {"device": device, "dtype": torch.bfloat16}
        weights = [torch.randn(WIDTH, 2 * WIDTH, **options) for _ in range(WEIGHTS)]
        rows = torch.randn(ROWS, WIDTH, **options)
        self._graph, self._weights = torch.cuda.CUDAGraph(), weights
        with torch.cuda.stream(self._stream):
            _ = rows @ weights[0]
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph, stream=self._stream):
                for weight in weights:
                    self._out = rows @ weight
        self.before: dict[str, Callable[[], object]] = {
            "nothing": lambda: None,
            "a copy of its inputs": self._copy_inputs,
        }

    def _copy_inputs(self) -> None:
        self._inputs.target.copy_(self._inputs.source, non_blocking=True)

    def took(self, before: str, piece: int) -> float:
        """Milliseconds on the device; ``piece``: bytes of the pieces of the traffic, 0 for none."""
        torch.cuda.synchronize()
        if piece:
            enqueue(self._traffic.pieces(piece), *self._bus)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            first.record()
            self.before[before]()
            self._graph.replay()
            last.record()
        last.synchronize()
        if piece and all(stream.query() for stream in self._bus):
            raise RuntimeError("expected the traffic to outlast the step, found that it was over")
        return float(first.elapsed_time(last))

    def launch(self, piece: int) -> float:
        """Microseconds of the host for each of many small kernels."""
        torch.cuda.synchronize()
        if piece:
            enqueue(self._traffic.pieces(piece), *self._bus)
        began = time.perf_counter()
        for _ in range(LAUNCHES):
            self._small.add_(1)
        return 1e6 * (time.perf_counter() - began) / LAUNCHES


def report(rows: list[dict[str, Any]]) -> str:
    """A row for each size of the pieces."""
    names = rows[0]["steps"]
    head = ["", *(f"step behind {name}, ms" for name in names), "a launch, host, us"]
    lines = [head]
    for row in rows:
        piece = row["piece_bytes"]
        title = f"beside pieces of {size(piece)}" if piece else "alone"
        lines.append([title, *map(spread, row["steps"].values()), spread(row["launch"])])
    return table(lines)


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", type=arguments.written, help="where results go as well; default: nowhere"
    )
    parser.add_argument(
        "--repeats", type=arguments.whole(1), default=12, help="samples of each case"
    )
    return parser.parse_args()


def main() -> int:
    """Run, and print the table; the exit status."""
    args = options()
    if lacks_cuda():
        return 2
    step = Step(torch.device("cuda", 0))
    document: dict[str, Any] = {"machines": [machine()], "rows": []}
    for piece in (0, *PIECE_BYTES):
        samples = [
            [step.took(name, piece) for name in step.before] for _ in range(args.repeats + 1)
        ]
        launches = [step.launch(piece) for _ in range(args.repeats + 1)]
        document["rows"].append({
            "piece_bytes": piece,
            "steps": {
                name: summary(times[1:]) for name, times in zip(step.before, zip(*samples))
            },
            "launch": summary(launches[1:]),
        })  # fmt: skip
    write_json(args.json, document)
    say(report(document["rows"]))
    return 0
