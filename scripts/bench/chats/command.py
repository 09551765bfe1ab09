"""python scripts/bench chats --model DIR [--modes floor,ours,simple,offloading] [--json FILE]

Conversations with a real `vllm serve` over HTTP, at vLLM's default settings: seeded chats of random
lengths that the GPU cache cannot hold together, each turn's history grown by the model's answers,
so many at a time; and prompts one at a time, which do and do not end on a block, before the chats
and after them.

  floor       plain vLLM whose GPU cache holds everything: what a tier can reach at best
  off         plain vLLM with the small GPU cache: everything is computed again
  ours        this tier; variables may follow, as in ours+KVOFFLOAD_LOAD_MODE=parked
  simple, offloading, lmcache

Each mode has a server of its own, one after the other, or with --side-by-side two at a time, each
on a GPU of its own (--gpus for more; --gpus-each where a server has several ranks, which --engine
says): what is measured at the same time is compared first. The model's folder needs a config alone,
weights are random then. Results are written to --json as they come; runs are put together with
--merge, which keeps when first tokens came and not the others, and --modes '' only makes the
tables. --times writes down when each token came and what the server says of each request's time in
the engine. --small runs on a CPU with a tiny model, to see that everything works: floor and ours
only.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scripts import Refused
from scripts.bench import jobs
from scripts.bench.arguments import filled, model, positive, recorded, settings, whole, written
from scripts.bench.chats import job as job_of
from scripts.bench.chats import report, server
from scripts.bench.chats.load import SMALL, Load
from scripts.bench.chats.play import PHASES
from scripts.bench.common import say, visible_gpus, write_json
from scripts.bench.serve.command import split
from scripts.bench.serve.process import Process
from scripts.bench.serve.sizes import with_changes


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=model, help="folder of a model; its config is enough, weights are random")
    add("--modes", default="floor,ours,simple,offloading")
    add("--phases", default=",".join(PHASES), help="which of %(default)s are played")
    add("--rounds", type=whole(1), default=1, help="how often all modes are played, on new servers")
    add("--side-by-side", action="store_true", help="as many modes at a time as --gpus allow")
    add("--gpus", type=whole(1), default=2, help="for --side-by-side")
    add("--gpus-each", type=whole(1), default=1, metavar="N", help="of these, for each server")
    add("--cpu-gib", type=positive, help="size of the tier (OffloadingConnector: 8/9 of it)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="any field of Load")
    add("--engine", type=settings, default={}, metavar="JSON", help="more for the server")
    add("--small", action="store_true", help="a CPU and a tiny model")
    add("--times", action="store_true", help="write down when each token came")
    add("--mode-timeout", type=positive, default=200.0, metavar="S", help="a mode, start included")
    add("--time-limit", type=positive, default=1e9, metavar="S", help="start no mode after it")
    add("--out", type=filled, default=Path("bench-out"), help="folder for logs and files")
    add("--json", type=written, help="default: bench_chats.json in --out")
    earlier = recorded("machines", "jobs", of_jobs="load")
    add("--merge", type=earlier, nargs="*", default=[], help="JSON files of earlier runs")
    return parser.parse_args()


def load_of(args: argparse.Namespace) -> Load:
    """The load that the command line asks for."""
    changes = list(args.set)
    if args.cpu_gib:
        changes += [f"cpu_gib={args.cpu_gib}", f"offloading_gib={args.cpu_gib * 8 / 9}"]
    return with_changes(SMALL if args.small else Load(), changes)


def known_phase(name: str) -> None:
    """Raise Refused unless it is one."""
    if name not in PHASES:
        raise Refused(f"phase {name!r}: expected one of {', '.join(PHASES)}")


def shares_of_gpus(args: argparse.Namespace) -> list[str]:
    """What each of the servers that run side by side may see; none without --side-by-side.

    Raises:
        Refused: there are fewer GPUs than asked for, or not enough for one server.
    """
    if not args.side_by_side:
        return []
    each = args.gpus_each
    if not 1 <= each <= args.gpus:
        raise Refused(f"expected --gpus-each from 1 to --gpus ({args.gpus}), found {each}")
    names = visible_gpus(args.gpus)
    return [",".join(names[at : at + each]) for at in range(0, len(names) - each + 1, each)]


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Run all jobs; returns what was written."""
    names = split(args.modes, server.engine_mode)
    phases = split(args.phases, known_phase)
    if names and args.model is None:
        raise Refused("expected --model DIR, found none")
    setup = server.Setup(
        args.model, load_of(args), args.small, args.engine, args.out,
        args.mode_timeout, args.times, [name for name in PHASES if name in phases],
    )  # fmt: skip
    document: dict[str, Any] = {"machines": [], "jobs": []}
    jobs.merge(document, args.merge)
    keep_first_tokens(document["jobs"])
    gpus = shares_of_gpus(args) if names else []
    planned = job_of.jobs(names, args.rounds, time.strftime("%Y-%m-%dT%H:%M:%S%z"), gpus)
    if planned:
        jobs.note_machine(document)
    play(planned, setup, args, document)
    return document


def keep_first_tokens(records: list[dict[str, Any]]) -> None:
    """Of merged runs, when first tokens came: the others are in their figures, and take a MiB."""
    for record in records:
        for found in record["results"].values():
            for request in found.get("requests", ()):
                del request["at"][1:]


def play(
    planned: list[list[job_of.Job]],
    setup: server.Setup,
    args: argparse.Namespace,
    document: dict[str, Any],
) -> None:
    """Run the sets of jobs, one after the other."""
    jobs.play(
        planned, lambda begun, changed, _: together(begun, setup, changed), setup, args, document
    )


def together(beside: list[job_of.Job], setup: server.Setup, changed: Any) -> None:
    """Jobs that run side by side: all start, then all play each phase at the same time."""
    until = time.monotonic() + setup.timeout
    with ExitStack() as stack:
        running = []
        for job in beside:
            if job.skipped(changed):
                continue
            process: Process[job_of.Job] = Process(job, setup, changed)
            stack.callback(process.end)
            running.append(process)
        running = [process for process in running if _next(process, "ready", until)]
        for phase in ["warm", *setup.phases]:
            for process in running:
                process.tell(phase)
            played = []
            for process in running:
                event = _next(process, "played", until)
                if event is not None:
                    played.append(process)
                    process.job.results[phase] = event["result"]
                    changed()
            running = played
        for process in running:
            process.hang_up()  # all at once; then each is waited for


def _next(process: Process[job_of.Job], kind: str, until: float) -> dict[str, Any] | None:
    """Its next event of a kind; None if none came in time, and then it is ended at once."""
    event = process.follow(kind, max(0.0, until - time.monotonic()))
    if event is None:
        process.end()  # it must not run beside the others
    return event


def main() -> int:
    """Run and print the tables and verdicts."""
    args = options()
    args.json = args.json or args.out / "bench_chats.json"
    # So that the processes of a job are ended with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    document = bench(args)
    write_json(args.json, document)
    say("\n" + report.text(document))
    say(f"Written: {args.json}")
    return 1 if any(job["error"] for job in document["jobs"]) else 0
