"""python scripts/soak run [--minutes 5] [--inject flips=15,raises=20,hangs=30] [--out soak-out]

Starts plain vLLM on a tiny model and has it answer each turn of some conversations: the key. Then
starts vLLM with a tier that is too small for them, beside a GPU cache that is smaller still, and
for the given time lets users ask both servers at random: turns in order, aborts, hang-ups, salts,
bursts, resets, memory pressure. Every answer is compared with the key. --inject adds faults to the
tier's copies: KIND=SECONDS between two of a kind on average, of flips (a bit of a CPU slot
changes), raises (a copy is refused), hangs (a copy takes 2 s).

With faults the tier checks all blocks (KVOFFLOAD_INTEGRITY=full), or wrong answers would be right.
Ends with status 1 if an answer is wrong, a request fails, the tier does not stay on, something
grows by more than it does in the plain server beside it, or a process or file is left. Results go
to soak.json in --out.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from scripts.bench import arguments
from scripts.bench.common import machine, say, write_json
from scripts.soak import server as servers
from scripts.soak.server import Server
from scripts.soak.traffic import (
    FAILED,
    LEFT,
    RIGHT,
    TIED,
    WRONG,
    Conversation,
    Traffic,
    answer_key,
)
from scripts.soak.watch import Watch, files_left, growth

PROGRESS_S = 10.0
KINDS = ("flips", "raises", "hangs")
# How much more than the plain server's may grow from the second quarter of a run to its last: both
# have busy moments under random traffic, at other times.
MOST_GROWTH = {"rss_mib": 64.0, "threads": 4.0, "descriptors": 16.0}


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=arguments.positive, default=5.0)
    add("--inject", default="", help="faults: some of flips=S,raises=S,hangs=S")
    add("--integrity", choices=("off", "sample", "full"), help="default: sample; full with faults")
    add("--ranks", type=arguments.whole(1), default=1, help="tensor-parallel ranks of each server")
    add("--users", type=arguments.whole(1), default=6)
    add("--conversations", type=arguments.whole(1), default=24)
    add("--turns", type=arguments.whole(1), default=3)
    add("--cpu-gib", type=arguments.positive, default=0.04, help="of the tier")
    add(
        "--pressure-gib",
        type=arguments.least_zero,
        default=0.5,
        help="memory taken beside the server, at times",
    )
    add("--in-turns", action="store_true", help="take up one conversation after the other")
    add("--seed", type=int, default=0)
    add("--out", type=arguments.filled, default=Path("soak-out"))
    args = parser.parse_args(argv)
    try:
        pairs = [part.split("=") for part in filter(None, args.inject.split(","))]
        args.faults = {kind: float(seconds) for kind, seconds in pairs}
    except ValueError:
        args.faults = {"": 0.0}
    if not set(args.faults) <= set(KINDS) or not all(s > 0 for s in args.faults.values()):
        parser.error(f"--inject: expected some of {'=S,'.join(KINDS)}=S, found {args.inject}")
    args.integrity = args.integrity or ("full" if args.faults else "sample")
    return args


def play(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run; what it was, and what was found."""
    model, log = folder / "model", args.out / "faults.log"
    servers.write_model(model)
    before = set(files_left())
    with Server(model, args.out / "plain.log", None, {}, args.ranks) as plain:
        say("plain vLLM answers: the key")
        key = answer_key(plain, args.conversations, args.turns, args.seed)
        tier = {"KVOFFLOAD_CPU_GIB": str(args.cpu_gib), "KVOFFLOAD_INTEGRITY": args.integrity}
        faults = {**args.faults, "log": str(log.absolute())} if args.faults else {}
        log.write_text("")
        with Server(model, args.out / "tier.log", tier, faults, args.ranks) as server:
            say(f"with the tier, and plain beside it, for {args.minutes:g} min")
            beside, found, share = _drive(args, key, plain, server, log)
            metrics = server.metrics()
    time.sleep(1)
    return {
        "machine": machine(), "minutes": args.minutes, "integrity": args.integrity,
        "cpu_gib": args.cpu_gib, "ranks": args.ranks, "users": args.users, "inject": args.faults,
        "in_turns": args.in_turns, "least_share": share,
        "turns": sum(map(len, key)), "faults": dict(faulted(log)), "metrics": metrics,
        "ended_after_s": server.ended_after, **_seen(*found), "beside": _seen(*beside),
        "files_left": sorted(set(files_left()) - before),
    }  # fmt: skip


Driven = tuple[Traffic, Watch]


def _drive(
    args: argparse.Namespace, key: list[Conversation], plain: Server, server: Server, log: Path
) -> tuple[Driven, Driven, float]:
    """Have both servers asked for the given time; first of the plain one, then of the other.

    And the least part of a prefix that the tier has the GPU keep.
    """
    asked = [
        Traffic(one, key, args.users, gib, args.seed, args.in_turns)
        for one, gib in ((plain, 0.0), (server, args.pressure_gib))
    ]
    share = 1.0
    with Watch(plain.pid) as one, Watch(server.pid) as other:
        for traffic in asked:
            traffic.start()
        end = time.monotonic() + 60 * args.minutes
        while time.monotonic() < end:
            time.sleep(min(PROGRESS_S, max(0.0, end - time.monotonic())))
            say(progress(asked[1], other, faulted(log)))
            share = min(share, server.metrics().get("kvoffload_gpu_prefix_ratio", 1.0))
        for traffic in asked:
            traffic.stop()
    return (asked[0], one), (asked[1], other), share


def _seen(traffic: Traffic, watch: Watch) -> dict[str, Any]:
    """What there is to say of one server, which has ended."""
    return {
        "counts": dict(traffic.counts), "wrongs": traffic.wrongs, "samples": watch.samples,
        "growth": {name: growth(watch.samples, name) for name in MOST_GROWTH},
        "processes_left": watch.left(),
    }  # fmt: skip


def faulted(log: Path) -> Counter[str]:
    """Faults so far, by kind."""
    return Counter(log.read_text().split())


def progress(traffic: Traffic, watch: Watch, faults: Counter[str]) -> str:
    """One line."""
    counts, last = traffic.counts, watch.samples[-1] if watch.samples else {}
    return (
        f"{last.get('at_s', 0):6.0f} s: {counts[RIGHT]} right, {counts[TIED]} tied, "
        f"{counts[WRONG]} wrong, {counts[FAILED]} failed, {counts[LEFT]} left early, "
        f"{counts['resets']} resets; {last.get('rss_mib', 0):.0f} MiB, "
        f"{last.get('threads', 0):.0f} threads, {last.get('descriptors', 0):.0f} descriptors; "
        f"faults: {', '.join(f'{n} {kind}' for kind, n in sorted(faults.items())) or 'none'}"
    )


def faults_of(found: dict[str, Any]) -> list[str]:
    """What is wrong with a run, in words; nothing if it is clean."""
    counts = found["counts"]
    wrong = [f"{counts[name]} answers {name}" for name in (WRONG, FAILED) if counts.get(name)]
    if counts.get(RIGHT, 0) < 20:
        wrong.append(f"expected 20 answers at least, found {counts.get(RIGHT, 0)}")
    wrong += _faults_of_tier(found["metrics"])
    for name, most in MOST_GROWTH.items():
        grew, beside = found["growth"][name], found["beside"]["growth"][name]
        if grew - beside > most:
            wrong.append(
                f"{name} grew by {grew:g}, plain vLLM's by {beside:g}, at most {most:g} more"
            )
    for kind in found["inject"]:
        if not found["faults"].get(kind):
            wrong.append(f"no fault of kind {kind} was made")
    if found["ended_after_s"] is None:
        wrong.append("the server did not end when it was asked to")
    wrong += [f"process {pid} was left" for pid in found["processes_left"]]
    return wrong + [f"file {name} was left in shared memory" for name in found["files_left"]]


def _faults_of_tier(metrics: dict[str, float]) -> list[str]:
    on = metrics.get("kvoffload_tier_state:on") == 1
    wrong = [] if on else ["the tier did not stay on"]
    for name in ("loaded", "evicted"):
        if not metrics.get(f"kvoffload_{name}_blocks_total"):
            wrong.append(f"no block was {name}: the run shows nothing of it")
    return wrong


def main() -> int:
    """Run, and say whether it was clean."""
    args = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its servers are ended
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        found = play(args, Path(folder))
    found["unclean"] = faults_of(found)
    write_json(args.out / "soak.json", found)
    for text in found["unclean"] + found["wrongs"][:10]:
        say(f"  MISS  {text}")
    say(f"Written: {args.out / 'soak.json'}" + ("" if found["unclean"] else "; clean"))
    return 1 if found["unclean"] else 0
