"""python scripts/bench enqueue [--blocks 354] [--repeats 20] [--json FILE]

What enqueuing a copy costs the host on a CUDA GPU: a step pays for it, because it enqueues what it
waits for, and Python runs one thread at a time. Blocks are Llama-3.1-8B's, 32 rows of 64 KiB; slots
lie in runs of 16, as the pieces of memory that are registered together are, or scattered, as in a
tier that has been full for long. Loads come whole or by layer. Every load is compared with what its
slots hold.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from kvoffload_patch.transfer.backends.base import CopyBackend, Streams
from kvoffload_patch.transfer.backends.slots import SlotMemory
from kvoffload_patch.transfer.backends.staged import StagedBackend
from kvoffload_patch.transfer.device import device_of
from kvoffload_patch.transfer.integrity import Checksums
from kvoffload_patch.transfer.layout import BlockLayout, Rows
from kvoffload_patch.transfer.tuning import LOAD_GROUPS
from scripts.bench import arguments
from scripts.bench.common import machine, quantile, say, table, write_json

LAYERS, ROW_BYTES = 32, 64 << 10
RUN_SLOTS = 16
FEW = (1, 16)  # blocks that a step of decodes stores


class Case(NamedTuple):
    """What is enqueued."""

    name: str
    stores: bool
    by_layer: bool
    blocks: int
    run: int  # slots that are neighbours


def cases(blocks: int) -> Iterator[Case]:
    """In the order of the table."""
    for run in (RUN_SLOTS, 1):
        where = "scattered" if run == 1 else f"runs of {run}"
        yield Case(f"load by layer, {blocks} blocks, {where}", False, True, blocks, run)
        yield Case(f"load, {blocks} blocks, {where}", False, False, blocks, run)
        yield Case(f"store, {blocks} blocks, {where}", True, False, blocks, run)
    for few in FEW:
        yield Case(f"store, {few} blocks", True, False, few, 1)


class Memory:
    """KV tensors and slots of so many blocks, ``uint8``, with random slots."""

    def __init__(self, blocks: int, on: torch.device, driver: Any) -> None:
        device = device_of(on)
        rows = [torch.zeros(blocks, ROW_BYTES, dtype=torch.uint8, device=on) for _ in range(LAYERS)]
        self.rows, self.layout = rows, BlockLayout(rows, blocks, 0)
        host = torch.randint(0, 256, (blocks, self.layout.block_bytes), dtype=torch.uint8)
        registrar = device.registrar()
        if registrar.register(host.data_ptr(), host.numel()):
            raise SystemExit("error: expected memory that the driver registers, found a refusal.")
        self.slots = SlotMemory(host, RUN_SLOTS)
        self.device = device
        self._driver = driver

    def backend(self, by_layer: bool) -> StagedBackend:
        """With checksums as by default, of loads that are not compared."""
        size = LAYERS // LOAD_GROUPS
        groups: list[Rows] = [(at, at + size) for at in range(0, LAYERS, size)] if by_layer else []
        checksums = Checksums(len(self.slots.slots), self.layout.device)
        return StagedBackend(self.layout, self.slots, self._driver, checksums, groups)

    def numbers(self, rng: np.random.Generator, case: Case) -> tuple[list[int], list[int]]:
        """Blocks and slots of a copy."""
        total = len(self.slots.slots)
        runs = rng.permutation(total // case.run)[:, None] * case.run
        slots = (runs + np.arange(case.run)).reshape(-1)
        return rng.permutation(total)[: case.blocks].tolist(), slots[: case.blocks].tolist()

    def compare(self, blocks: list[int], slots: list[int]) -> None:
        """A load's blocks and its slots.

        Raises:
            SystemExit: they differ.
        """
        for block, slot in list(zip(blocks, slots))[:: max(1, len(blocks) // 8)]:
            found = torch.cat([row[block] for row in self.rows]).cpu()
            if not torch.equal(found, self.slots.slots[slot]):
                raise SystemExit(f"error: block {block} is not what slot {slot} holds.")


def measured(
    memory: Memory, case: Case, repeats: int, backend: CopyBackend | None = None
) -> dict[str, Any]:
    """Milliseconds on the host, and on the device until its first rows and all; compiled before."""
    rng, device = np.random.default_rng(0), memory.device
    backend = backend or memory.backend(case.by_layer)
    streams = Streams(blocks=device.new_stream(-1), bus=device.new_stream(-1))
    host, first_rows, on_device = [], [], []
    for repeat in range(repeats + 2):
        blocks, slots = memory.numbers(rng, case)
        begin, first, end = (device.new_event(timed=True) for _ in range(3))
        device.synchronize()
        begin.record(streams.blocks)
        before = 0
        began = time.perf_counter()
        for there in (backend.store if case.stores else backend.load)(blocks, slots, streams):
            if there > before == 0:
                first.record(streams.blocks)
            before = there
        took = time.perf_counter() - began
        end.record(streams.bus if case.stores else streams.blocks)
        device.synchronize()
        if repeat >= 2:
            host.append(took * 1000)
            first_rows.append(begin.elapsed_time(first if before else end))
            on_device.append(begin.elapsed_time(end))
        if not case.stores:
            memory.compare(blocks, slots)
    return {"case": case.name, "host_ms": host, "first_ms": first_rows, "device_ms": on_device}


def report(rows: list[dict[str, Any]]) -> str:
    """A line for each case: median, smallest and largest."""
    lines: list[tuple[str, ...]] = [("ms", "host", "device")]
    for row in rows:
        figures = (
            f"{quantile(row[side], 0.5):.2f} ({min(row[side]):.2f} to {max(row[side]):.2f})"
            for side in ("host_ms", "device_ms")
        )
        lines.append((row["case"], *figures))
    return table(lines)


def main() -> int:
    """Measure every case; a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--blocks", type=arguments.whole(1), default=354, help="of a load: 5,664 tokens"
    )
    parser.add_argument("--repeats", type=arguments.whole(1), default=20)
    parser.add_argument("--json", type=arguments.written, metavar="FILE")
    args = parser.parse_args()
    gpu = torch.device("cuda", 0)
    memory = Memory(3 * args.blocks, gpu, device_of(gpu).copier())
    document: dict[str, Any] = {"machines": [machine()], "rows": []}
    for case in cases(args.blocks):
        say(case.name)
        document["rows"].append(measured(memory, case, args.repeats))
    print(report(document["rows"]))
    if args.json:
        write_json(args.json, document)
    return 0
