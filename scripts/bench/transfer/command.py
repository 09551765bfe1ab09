"""python scripts/bench transfer [--host-only] [--block-kib 256,...] [--layouts apart,mla,...]

How fast KV blocks move between GPU and CPU memory through the copy engine, by backend, block size
and order of CPU slots, beside plain cudaMemcpyAsync of one big pinned buffer in the same run.

Llama-3.1-8B's shape (`apart`, `packed`), the size of a block varied by its tokens, and those of
bigger models (`mla`, `two_heads`, `fp8`) by --block-tokens. GPU blocks are scattered. Slots are
contiguous, or `fragmented`: every other slot in random order, so that no two are neighbours. Bytes
are checked first: random ones are stored, their targets poisoned, and the whole cache compared.

  store, load    one way; a load beside the step, submitted by the engine's thread
  inline         a load that the step waits for, submitted within it
  both           both ways at once; GB/s of the two together
  host us        time that begin_step and end_step take from the step
  matmul         a stream of bf16 products of 8192 x 8192: how many times as long with the transfer

Without a GPU it runs with little memory, and with --small with little of everything, to see that
it works. Results go to --json as they come.
"""

from __future__ import annotations

import argparse
import gc
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

from scripts.bench.arguments import filled, positive, whole, wholes, written
from scripts.bench.common import GIB, machine, say, summary, write_json
from scripts.bench.transfer import report, setup
from scripts.bench.transfer.measure import FIGURES, Matmuls, Memcpy, by_engine, speed
from scripts.bench.transfer.shapes import BY_BYTES, BY_TOKENS, SHAPES

KINDS = ("store", "load", "inline", "both")
BACKENDS = ("staged", "torch")


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--block-kib",
        type=wholes(1),
        default="256,512,1024,2048,4096,8192",
        help="block bytes, KiB",
    )
    add("--backends", default=",".join(BACKENDS))
    add("--integrity", default=report.DEFAULT, help="checksums: some of off,sample,full")
    add("--orders", default=",".join(setup.ORDERS))
    add(
        "--block-tokens",
        type=wholes(1),
        default="16,32,64,128,256",
        help="of bigger models' layouts",
    )
    add("--layouts", default="apart,packed", help=f"of {', '.join(SHAPES)}; packed: 2 MiB only")
    add("--small", action="store_true", help="every layout, few and small blocks, one repeat")
    add("--gib", type=positive, help="bytes of one transfer; default 2, without a GPU 1/64")
    add("--repeats", type=whole(1), default=5)
    add("--rounds", type=whole(1), default=1, help="how often what is compared takes turns")
    add("--host-only", action="store_true", help="no matmuls: GB/s and host time only")
    add("--time-limit", type=positive, default=1e9, metavar="S", help="start no case after that")
    add("--out", type=filled, default=Path("bench-out"))
    add("--json", type=written, help="default: bench_transfer.json in --out")
    add("--png", type=written, help="default: bench_transfer.png in --out")
    args = parser.parse_args(argv)
    if args.small:
        args.layouts, args.block_kib, args.block_tokens = ",".join(SHAPES), [256, 2048], [16, 64]
        args.gib, args.repeats, args.host_only = 1 / 64, 1, True
    _check(parser, args)
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name, known in (
        ("layouts", SHAPES), ("backends", BACKENDS), ("orders", setup.ORDERS),
        ("integrity", ("off", "sample", "full")),
    ):  # fmt: skip
        if unknown := set(getattr(args, name).split(",")) - set(known):
            parser.error(f"--{name}: expected some of {', '.join(known)}, found {min(unknown)}")


class Bench:
    """One run: what all cases share, and the results so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        if not cuda:
            torch.set_num_threads(1)  # more would wait for each other on a busy machine
        self.gib = args.gib or (2.0 if cuda else 1 / 64)
        self.deadline = time.monotonic() + args.time_limit
        self.matmuls = Matmuls() if cuda and not args.host_only else None
        self.document: dict[str, Any] = {
            "machine": machine(), "gib": self.gib, "memcpy": [], "cases": [], "auto": [],
        }  # fmt: skip
        self.memcpy = Memcpy(int(self.gib * GIB), self.device)

    def run(self) -> None:
        """All cases; the plain copies are repeated beside each block size."""
        wanted = self.args.layouts.split(",")
        sizes = [number << 10 for number in self.args.block_kib]
        self._group([kind for kind in wanted if kind in BY_BYTES], sizes)
        tokens = self.args.block_tokens
        for kind in wanted:
            if kind in BY_TOKENS:
                self._group([kind], [n * BY_TOKENS[kind].token_bytes for n in tokens])

    def _group(self, kinds: list[str], sizes: list[int]) -> None:
        """Layouts whose blocks share slots: every size divides the largest."""
        if not kinds or time.monotonic() >= self.deadline:
            return
        began, largest = time.monotonic(), max(sizes)
        need = 4 * setup.blocks_in(self.gib, largest) * largest
        slots = setup.Slots(need, largest, self.device)
        say(f"{need / GIB:.2f} GiB of slots after {time.monotonic() - began:.1f} s")
        for block_bytes in sizes:
            self._plain(block_bytes)
            for kind in kinds:
                # One size is enough to see that the layout makes no difference.
                if kind != "packed" or block_bytes == 2 << 20 or len(sizes) == 1:
                    self._layout(kind, block_bytes, slots.of(block_bytes))
                gc.collect()
        slots.close()

    def _layout(self, kind: str, block_bytes: int, slots: Any) -> None:
        # As many as the slots are for: blocks of any size fill those of the largest.
        count = slots.slots.shape[0] // 4
        kv = setup.KV(kind, block_bytes, 2 * count, self.device)
        if kind == "apart" and self.device.type == "cuda":
            auto = setup.Mover(kv, slots, "auto")
            chosen = {"block_bytes": block_bytes, "name": auto.name, "report": auto.report}
            self.document["auto"].append(chosen)
            say(f"auto, blocks of {block_bytes >> 10} KiB: {auto.report}")
            auto.engine.close()
        # What is compared is measured side by side.
        for order, round_ in product(self.args.orders.split(","), range(self.args.rounds)):
            self._round(kv, slots, kind, order, round_)

    def _round(self, kv: Any, slots: Any, kind: str, order: str, round_: int) -> None:
        """Every backend, made once more: where its buffers come to lie makes a percent or two.

        In another order in each round, so that each is early and late equally often.
        """
        names = self.args.backends.split(",") if self.device.type == "cuda" else ["torch"]
        wanted = list(product(names, self.args.integrity.split(",")))
        first = round_ // 2 % len(wanted)
        wanted = wanted[first:] + wanted[:first]
        movers = self._movers(kv, slots, wanted[::-1] if round_ % 2 else wanted)
        count = slots.slots.shape[0] // 4
        for mover in movers:
            if time.monotonic() < self.deadline:
                self._case(kv, slots, mover, kind, order, count)
        for mover in movers:
            mover.engine.close()

    def _movers(self, kv: Any, slots: Any, wanted: list[tuple[str, str]]) -> list[setup.Mover]:
        """Those of these backends, and checksums, that can be had here."""
        movers = []
        for name, integrity in wanted:
            try:
                movers.append(setup.Mover(kv, slots, name, integrity))
            except Exception as error:  # noqa: BLE001 - the other backends are still measured
                case = {"backend": report.named(name, integrity), "error": str(error)}
                if case not in self.document["cases"]:
                    say(f"{case['backend']}: {error}")
                    self.document["cases"].append(case)
        return movers

    def _case(self, kv: Any, slots: Any, mover: Any, layout: str, order: str, count: int) -> None:
        block_bytes = kv.layout.block_bytes
        case = {"backend": mover.name, "layout": layout, "block_bytes": block_bytes,
                "order": order, "kinds": {}}  # fmt: skip
        # An odd number of blocks: chunks and runs do not come out even.
        checked = min(count, setup.blocks_in(self.gib / 16, block_bytes) | 1)
        setup.check_bytes(kv, slots, mover, order, checked)
        moves = setup.ways(order, count)
        setup.fill(mover, moves)
        for kind in KINDS:
            case["kinds"][kind] = self._measure(
                by_engine(mover, kind, moves), kind, count * block_bytes
            )
        keep(self.document["cases"], case)
        write_json(self.args.json, self.document)
        say(report.line(case))

    def _plain(self, block_bytes: int) -> None:
        found = {
            kind: self._measure(self.memcpy.transfer(kind), kind, int(self.gib * GIB))
            for kind in KINDS
            if kind != "inline"
        }
        self.document["memcpy"].append({"block_bytes": block_bytes, "kinds": found})
        say(report.line({"backend": "memcpy", "block_bytes": block_bytes, "kinds": found}))

    def _measure(self, transfer: Any, kind: str, nbytes: int) -> dict[str, Any]:
        nbytes *= 2 if kind == "both" else 1
        found = speed(transfer, nbytes, self.args.repeats)
        if self.matmuls is not None and kind != "inline":
            repeats = max(1, self.args.repeats // 2)
            found["matmul"] = self.matmuls.beside(transfer, found["seconds"]["median"], repeats)
        return found


def keep(cases: list[dict[str, Any]], case: dict[str, Any]) -> None:
    """Add a case, or its samples to those of an earlier round."""
    same = ("backend", "layout", "block_bytes", "order")
    for earlier in cases:
        if all(earlier.get(name) == case[name] for name in same):
            for kind, found in case["kinds"].items():
                before = earlier["kinds"][kind]
                for name in FIGURES:
                    samples = before[name]["samples"] + found[name]["samples"]
                    before[name] = summary(samples)
            return
    cases.append(case)


def main() -> None:
    """Run, print the tables and the verdicts, draw."""
    args = options()
    args.json = args.json or args.out / "bench_transfer.json"
    args.png = args.png or args.out / "bench_transfer.png"
    bench = Bench(args)
    try:
        bench.run()
    finally:
        write_json(args.json, bench.document)
        say("\n" + report.text(bench.document))
        say(f"Written: {args.json}")
    report.draw(bench.document, args.png)
