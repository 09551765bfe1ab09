"""python scripts/bench tuned [--only LOAD_GROUPS,...] [--repeats 12] [--json FILE]

What the numbers that tune copies (`kvoffload_patch/transfer/tuning.py`) are worth, on one CUDA GPU:
the same copies with smaller and with larger values. Blocks and slots are those of `enqueue`, and
every load is compared with what its slots hold. Ends with status 2 where there is no CUDA GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvoffload_patch.transfer import tuning
from kvoffload_patch.transfer.backends.ids import IdUploader
from kvoffload_patch.transfer.backends.tiles import TileMover, id_copier
from kvoffload_patch.transfer.backends.torch import TorchBackend
from kvoffload_patch.transfer.device import device_of
from scripts.bench import arguments
from scripts.bench.common import lacks_cuda, machine, say, summary, table, write_json
from scripts.bench.probes import enqueue
from scripts.bench.probes.copy_queue import spread
from scripts.bench.probes.enqueue import Case, Memory
from scripts.bench.transfer.report import size
from scripts.bench.varied import varied

MIB = 1 << 20
BLOCKS = 354  # of a load: 5,664 tokens
ALWAYS_RUNS, NEVER_RUNS = 1, 1 << 30
HOST, FIRST, DEVICE = "host, ms", "first rows, ms", "device, ms"
# Of one measurement, by the name of a column.
Samples = dict[str, list[float]]


class Varied(NamedTuple):
    """A number, the values that it is given, and what is measured with each."""

    name: str
    values: Sequence[int]
    cases: dict[str, Callable[[Memory, int], Samples]]


def staged(stores: bool, by_layer: bool, run: int) -> Callable[[Memory, int], Samples]:
    """A copy by the staged backend, enqueued at once."""
    case = Case("", stores, by_layer, BLOCKS, run)

    def measure(memory: Memory, repeats: int) -> Samples:
        found = enqueue.measured(memory, case, repeats)
        first = {FIRST: found["first_ms"]} if by_layer else {}
        return {HOST: found["host_ms"], **first, DEVICE: found["device_ms"]}

    return measure


def by_torch(memory: Memory, repeats: int) -> Samples:
    """A load by torch's own copies, of runs of slots."""
    case = Case("", False, False, BLOCKS, enqueue.RUN_SLOTS)
    found = enqueue.measured(memory, case, repeats, TorchBackend(memory.layout, memory.slots))
    return {HOST: found["host_ms"], DEVICE: found["device_ms"]}


def kernel(to_flat: bool, nbytes: int) -> Callable[[Memory, int], Samples]:
    """The kernel alone, on a buffer of so many bytes."""

    def measure(memory: Memory, repeats: int) -> Samples:
        layout, device = memory.layout, memory.device
        flat = torch.zeros(nbytes, dtype=torch.uint8, device=layout.device)
        mover = TileMover(layout, layout.block_bytes, [flat.data_ptr()])
        stream, count = device.new_stream(), min(BLOCKS, nbytes // layout.block_bytes)
        ids = torch.tensor(memory.numbers(np.random.default_rng(0), _MANY)[0], device=layout.device)

        def move() -> None:
            mover.move(stream, to_flat, flat, ids, 0, count)

        return {DEVICE: on_device(memory, stream, move, repeats)}

    return measure


def upload(memory: Memory, repeats: int) -> Samples:
    """Numbers of as many blocks as are made ready at a time, read from pinned memory."""
    count, device = tuning.READY_BLOCKS, memory.layout.device
    ids = IdUploader(device, count, count, id_copier(device))
    stream, numbers = memory.device.new_stream(), np.arange(count)
    return {DEVICE: on_device(memory, stream, lambda: ids.upload(numbers, stream), repeats)}


def on_device(
    memory: Memory, stream: Any, enqueue_it: Callable[[], object], repeats: int
) -> list[float]:
    """Milliseconds on the device of what is enqueued on a stream that has nothing else."""
    device, found = memory.device, []
    for repeat in range(repeats + 2):
        begin, end = device.new_event(timed=True), device.new_event(timed=True)
        device.synchronize()
        begin.record(stream)
        enqueue_it()
        end.record(stream)
        device.synchronize()
        if repeat >= 2:
            found.append(begin.elapsed_time(end))
    return found


_MANY = Case("", False, False, BLOCKS, 1)
_BY_LAYER = {
    "load by layer, runs of 16": staged(False, True, 16),
    "load by layer, scattered": staged(False, True, 1),
}
_STORES = {"store, runs of 16": staged(True, False, 16), "store, scattered": staged(True, False, 1)}
_KERNELS = {
    "packing 32 MiB": kernel(True, 32 * MIB),
    "unpacking 128 MiB": kernel(False, 128 * MIB),
}
NUMBERS = (
    Varied("LOAD_GROUPS", (1, 2, 4, 8, 16), _BY_LAYER),
    Varied("LOAD_SLICE_BYTES", (32 * MIB, 64 * MIB, 128 * MIB, 192 * MIB, 256 * MIB), _BY_LAYER),
    Varied("LOAD_PIECE_BYTES", (8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB), _BY_LAYER),
    Varied("LOAD_BUFFERS", (1, 2, 3, 4), _BY_LAYER),
    Varied(
        "RUN_BLOCKS",
        (ALWAYS_RUNS, 4, NEVER_RUNS),
        {f"load by layer, runs of {run}": staged(False, True, run) for run in (1, 2, 3, 4, 8)},
    ),
    Varied("STORE_SLICE_BYTES", (8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB), _STORES),
    Varied("STORE_BUFFERS", (1, 2, 3, 4), _STORES),
    Varied("TILE_BYTES", (1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15), _KERNELS),
    Varied("LAUNCHED_PROGRAMS", (256, 1024, 4096, 16384, 65536), _KERNELS),
    Varied("IDS_PROGRAM_BLOCKS", (128, 256, 512, 1024), {"1,024 numbers": upload}),
    Varied(
        "STAGING_BYTES", (8 * MIB, 32 * MIB, 128 * MIB), {"load by torch, runs of 16": by_torch}
    ),
)


def measured(number: Varied, memory: Memory, repeats: int) -> list[dict[str, Any]]:
    """A row for each case and value."""
    rows = []
    for name, measure in number.cases.items():
        for value in number.values:
            with varied(number.name, value):
                found = measure(memory, repeats)
            figures = {column: summary(samples) for column, samples in found.items()}
            ours = value == getattr(tuning, number.name)
            rows.append({"number": number.name, "case": name, "value": value, "ours": ours,
                         "figures": figures})  # fmt: skip
    return rows


def report(rows: list[dict[str, Any]]) -> str:
    """A table for each number; bold: the value that it has."""
    parts = []
    for name in dict.fromkeys(row["number"] for row in rows):
        own = [row for row in rows if row["number"] == name]
        columns = list(dict.fromkeys(column for row in own for column in row["figures"]))
        lines = [[f"{name}", "", *columns]]
        for row in own:
            value = said(name, row["value"])
            figures = row["figures"]
            cells = [spread(figures[one]) if one in figures else "-" for one in columns]
            lines.append([row["case"], f"**{value}**" if row["ours"] else value, *cells])
        parts.append(table(lines))
    return "\n\n".join(parts)


def said(name: str, value: int) -> str:
    """A value in words."""
    if name == "RUN_BLOCKS" and value in (ALWAYS_RUNS, NEVER_RUNS):
        return "runs" if value == ALWAYS_RUNS else "rows"
    return size(value) if name.endswith("_BYTES") else f"{value:,}"


def options() -> argparse.Namespace:
    """Read the command line."""
    names = [number.name for number in NUMBERS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(names), help="numbers, by name")
    parser.add_argument(
        "--repeats", type=arguments.whole(1), default=12, help="samples of each case"
    )
    parser.add_argument(
        "--json", type=arguments.written, metavar="FILE", help="where results go as well"
    )
    args = parser.parse_args()
    args.only = args.only.split(",")
    if unknown := set(args.only) - set(names):
        parser.error(f"expected some of {', '.join(names)}, found {', '.join(sorted(unknown))}")
    return args


def main() -> int:
    """Measure, and print the tables; the exit status."""
    args = options()
    if lacks_cuda():
        return 2
    gpu = torch.device("cuda", 0)
    memory = Memory(3 * BLOCKS, gpu, device_of(gpu).copier())
    document: dict[str, Any] = {"machines": [machine()], "rows": []}
    for number in NUMBERS:
        if number.name in args.only:
            say(number.name)
            document["rows"] += measured(number, memory, args.repeats)
            write_json(args.json, document)
    print(report(document["rows"]))
    return 0
