"""Replays a trace with every policy, and prints what each of them found, moved and recomputed.

The hit rate is of the blocks of prompts that a cache without end would have found; recomputed is
the rest of them. The optimum is what a cache as large as GPU and tier together finds that knows the
trace; it is not known where requests are preempted. Traces: names of generated ones (--seed,
--seconds), or files of JSON lines in the form of the public Mooncake traces.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from scripts import Refused
from scripts.bench import arguments
from scripts.simulate import report, sides, trace, workloads
from scripts.simulate.belady import most_hits
from scripts.simulate.model import Figures, Machine, Model

_WORDS = {
    "gpu_blocks": "blocks of the GPU",
    "cpu_blocks": "blocks of the tier",
    "block_tokens": "tokens of a block",
    "token_bytes": "bytes of a token's KV",
    "load_gbs": "bus from the CPU, GB/s",
    "store_gbs": "bus to the CPU, GB/s",
    "prefill": "prompt tokens computed in a second",
    "token_s": "seconds for each token of an answer",
    "step_tokens": "prompt tokens of a step at most",
    "running": "requests that have blocks at most",
}
Replayed = tuple[dict[str, Figures], "tuple[int, int] | None"]


def replay(requests: Sequence[trace.Request], machine: Machine, names: Iterable[str]) -> Replayed:
    """Figures by side, and the optimum's: blocks found, and blocks that could be found."""
    found = {}
    for name in names:
        rules = sides.SIDES[name].rules(machine)
        found[name] = Model(machine, rules, requests).run(_progress(name, len(requests)))
    if machine.preempt:
        return found, None
    room = machine.gpu_blocks + machine.cpu_blocks
    return found, most_hits(requests, room, machine.block_tokens)


def _progress(name: str, requests: int) -> Callable[[int], None]:
    """Writes to stderr, at most once in a second, how far a replay is."""
    began = last = time.monotonic()

    def tell(left: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > 1:
            last = now
            share, so_far = 100 * (requests - left) // requests, now - began
            print(f"  {name}: {share} %, {so_far:.0f} s", file=sys.stderr, flush=True)

    return tell


def _requests(name: str, options: argparse.Namespace) -> list[trace.Request]:
    if name in workloads.WORKLOADS:
        if not (found := workloads.generate(name, options.seconds, options.seed)):
            raise Refused(f"{name}: expected requests in {options.seconds} seconds, found none")
        return found
    return trace.read(Path(name), options.block_tokens)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    listed = ", ".join(workloads.WORKLOADS)
    parser.add_argument("traces", nargs="*", help=f"a file, or one of {listed} (all)")
    parser.add_argument("--sides", nargs="+", choices=sides.SIDES, default=list(sides.SIDES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=arguments.positive, default=1800.0, help="of a generated trace"
    )
    parser.add_argument("--preempt", action="store_true", help="answers take blocks as they grow")
    for name, words in _WORDS.items():
        default = Machine._field_defaults[name]
        option = "--" + name.replace("_", "-")
        kind = arguments.whole(1) if isinstance(default, int) else arguments.positive
        parser.add_argument(option, type=kind, default=default, help=f"{words} (%(default)s)")
    return parser.parse_args()


def main() -> int:
    """Replay, and print a table for each trace."""
    options = parsed()
    machine = Machine(**{name: getattr(options, name) for name in Machine._fields})
    for name in options.traces or workloads.WORKLOADS:
        requests = _requests(name, options)
        print(f"{name}: {len(requests)} requests", file=sys.stderr, flush=True)
        found, best = replay(requests, machine, options.sides)
        tokens = sum(request.prompt_tokens for request in requests)
        print(f"\n{name}: {len(requests)} requests, {tokens / 1e6:.1f} M prompt tokens\n")
        print(report.as_table(found, best, machine))
    return 0
