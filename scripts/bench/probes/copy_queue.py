"""python scripts/bench copy_queue [--json FILE] [--repeats 5] [--gib 1]

What a copy waits for behind others, on one CUDA GPU.

1 GiB of copies of pinned memory is enqueued on a stream, then one small copy on another stream,
which is waited for: milliseconds from before it is enqueued. Both directions of both, several sizes
of the pieces of the 1 GiB, and stream priorities; and the 1 GiB on two streams in turn, each piece
behind the one before, as the staged backend does it.

Bytes are checked before anything is timed. Ends with status 2 where there is no CUDA GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from scripts.bench import arguments
from scripts.bench.common import GIB, lacks_cuda, machine, say, summary, table, write_json
from scripts.bench.transfer import setup
from scripts.bench.transfer.report import size

UP, DOWN = "CPU to GPU", "GPU to CPU"
WAYS = (UP, DOWN)
SMALL_BYTES = (16 << 10, 64 << 10, 1 << 20)
PIECE_BYTES = (64 << 20, 24 << 20, 2 << 20)
# Priorities and number of the streams; see `Queue`.
QUEUES = ("equal", "small copy first", "small copy last", "equal, two streams in turn")


@dataclass(frozen=True)
class Copy:
    """A copy of ``uint8 [n]`` from ``source`` to ``target``; one is pinned, one on the device."""

    target: torch.Tensor
    source: torch.Tensor

    def pieces(self, nbytes: int) -> list[Copy]:
        """The same in copies of so many bytes, the last one perhaps smaller."""
        return [Copy(*pair) for pair in zip(self.target.split(nbytes), self.source.split(nbytes))]


def new_copy(way: str, nbytes: int, device: torch.device) -> Copy:
    """Memory for a copy, with random bytes at its source; ``nbytes`` is a multiple of 8."""
    there = torch.randint(-(1 << 63), (1 << 63) - 1, (nbytes // 8,), device=device)
    there = there.view(torch.uint8)
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if way == DOWN:
        return Copy(here, there)
    here.copy_(there)
    return Copy(there, here)


def enqueue(copies: list[Copy], *streams: Any) -> Any:
    """Enqueue copies, on several streams in turn, one behind the other; the event behind them."""
    end = None
    for number, copy in enumerate(copies):
        stream = streams[number % len(streams)]
        with torch.cuda.stream(stream):
            if len(streams) > 1 and end is not None:
                stream.wait_event(end)
            copy.target.copy_(copy.source, non_blocking=True)
            if len(streams) > 1 or copy is copies[-1]:
                end = torch.cuda.Event()
                end.record()
    return end


class Queue:
    """The small copies beside the many bytes.

    Args:
        nbytes: of the copies that the small one is behind.
        repeats: samples of each case.
    """

    def __init__(self, nbytes: int, repeats: int, device: torch.device) -> None:
        self._repeats = repeats
        self._device = device
        self._traffic = {way: new_copy(way, nbytes, device) for way in WAYS}
        self._small = {(way, n): new_copy(way, n, device) for way in WAYS for n in SMALL_BYTES}
        streams = [torch.cuda.Stream(device, priority=p) for p in (0, 0, -1, 0)]
        plain, other, urgent, second = streams
        # Those of the 1 GiB, and that of the small copy; lower priorities are more urgent.
        pairs = (([plain], other), ([plain], urgent), ([urgent], other), ([plain, second], other))
        self._queues: dict[str, tuple[list[Any], Any]] = dict(zip(QUEUES, pairs))
        for (way, small_bytes), copy in self._small.items():
            for stream in streams:  # they are warm then
                self._check(f"{size(small_bytes)}, {way}", copy, [copy], stream)
        for way, copy in self._traffic.items():
            for piece in PIECE_BYTES:
                pieces = copy.pieces(piece)
                self._check(f"{way} in pieces of {size(piece)}", copy, pieces, plain)

    def _check(self, what: str, whole: Copy, copies: list[Copy], stream: Any) -> None:
        """Copy over poison, and compare."""
        whole.target.fill_(setup.POISON)
        torch.cuda.synchronize()
        enqueue(copies, stream).synchronize()
        if not torch.equal(whole.target.to(self._device), whole.source.to(self._device)):
            raise RuntimeError(f"{what}: expected the source's bytes, found others")

    def alone(self) -> list[dict[str, Any]]:
        """Each small copy with nothing beside it."""
        _, stream = self._queues["equal"]
        found = []
        for (way, nbytes), copy in self._small.items():
            times = [self._timed([], [stream], copy, stream)[0] for _ in range(self._repeats)]
            found.append({"way": way, "bytes": nbytes, "ms": summary(times)})
        return found

    def beside(self) -> Iterator[dict[str, Any]]:
        """Each small copy behind the many bytes, for each size of pieces and each priority."""
        for piece in PIECE_BYTES:
            traffics = {way: copy.pieces(piece) for way, copy in self._traffic.items()}
            for priority, (first, second) in self._queues.items():
                for beside, traffic in traffics.items():
                    for (way, nbytes), copy in self._small.items():
                        samples = [self._timed(traffic, first, copy, second)
                                   for _ in range(self._repeats)]  # fmt: skip
                        times, left = zip(*samples)
                        yield {"piece_bytes": piece, "priority": priority, "beside": beside,
                               "way": way, "bytes": nbytes, "ms": summary(times),
                               "traffic_left_ms": summary(left)}  # fmt: skip

    @staticmethod
    def _timed(traffic: list[Copy], first: list[Any], small: Copy, second: Any) -> Any:
        """Milliseconds until the small copy has ended, and until the traffic has.

        Both from before the small one is enqueued; 0 for traffic that was over by then.
        """
        torch.cuda.synchronize()
        end = enqueue(traffic, *first)
        over = end is None or end.query()
        began = time.perf_counter()
        enqueue([small], second).synchronize()
        took = time.perf_counter() - began
        if end is not None:
            end.synchronize()
        left = 0.0 if over else time.perf_counter() - began
        return took * 1e3, left * 1e3


def spread(found: dict[str, Any]) -> str:
    """Median, smallest and largest; three digits."""
    median, least, most = (f"{found[key]:#.3g}".rstrip(".") for key in ("median", "min", "max"))
    return f"{median} ({least} to {most})"


def queue_text(document: dict[str, Any]) -> str:
    """For each size of the small copy a table: pieces and priorities by directions."""
    pairs = [(way, beside) for way in WAYS for beside in WAYS]
    head = ["ms", *(f"{way} beside {beside}" for way, beside in pairs)]
    parts = []
    for nbytes in SMALL_BYTES:
        alone = {c["way"]: spread(c["ms"]) for c in document["alone"] if c["bytes"] == nbytes}
        cells = {(c["piece_bytes"], c["priority"], c["way"], c["beside"]): spread(c["ms"])
                 for c in document["queue"] if c["bytes"] == nbytes}  # fmt: skip
        rows = [head, ["nothing beside it", *(alone.get(way, "-") for way, _ in pairs)]]
        for piece in PIECE_BYTES:
            for name in QUEUES:
                row = [cells.get((piece, name, *pair), "-") for pair in pairs]
                rows.append([f"pieces of {size(piece)}, priority {name}", *row])
        title = f"A copy of {size(nbytes)} beside {document['gib']:g} GiB:"
        parts.append(f"{title}\n\n{table(rows)}")
    return "\n\n".join([*parts, _left(document)])


def _left(document: dict[str, Any]) -> str:
    """Whether the many bytes were still under way: else the small copy was beside nothing."""
    lines = []
    for piece in PIECE_BYTES:
        cases = [c for c in document["queue"] if c["piece_bytes"] == piece]
        left = [ms for c in cases for ms in c["traffic_left_ms"]["samples"]]
        if left:
            over = sum(ms == 0 for ms in left)
            lines.append(
                f"Pieces of {size(piece)}: when the small copy was enqueued, the others went on "
                f"for {spread(summary(left))} ms; they were over in {over} of {len(left)} samples."
            )
    return "\n".join(lines)


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", type=arguments.written, help="where results go as well; default: nowhere"
    )
    parser.add_argument(
        "--repeats", type=arguments.whole(1), default=5, help="samples of each case"
    )
    parser.add_argument("--gib", type=arguments.positive, default=1.0, help="bytes behind which")
    return parser.parse_args()


def main() -> int:
    """Run, and print the tables; the exit status."""
    args, began = options(), time.monotonic()
    if lacks_cuda():
        return 2
    device = torch.device("cuda", 0)
    document: dict[str, Any] = {"machine": machine(), "gib": args.gib, "alone": [], "queue": []}
    try:
        queue = Queue(int(args.gib * GIB) // 8 * 8, args.repeats, device)
        document["alone"] = queue.alone()
        document["queue"].extend(queue.beside())
        say(queue_text(document))
    finally:
        document["seconds"] = time.monotonic() - began
        write_json(args.json, document)
    say(f"\n{document['machine']['gpu']}; {document['seconds']:.1f} s")
    return 0
