"""python scripts/bench serve --model DIR [--modes off,ours,simple,...] [--scenarios s3,s1,...]

Scenarios S1 to S4 on a real vLLM: plain, with this tier, and with what else there is, in turn.

  s3       sessions that the GPU cannot hold together, all at once, several turns
  s1       one prompt of S3 whose KV has left the GPU; time of `LLM.generate` for one token,
           and of the same again, which the GPU has then
  s4       decodes that run while prompts whose KV has left the GPU arrive at a fixed rate
  s2       fresh prompts: nothing to find, what storing costs
  s1long   S1 with longer prompts in rotation, on an engine with a smaller GPU cache
  one      prompts answered with one token: are they stored and found again?
  s4graphs S4 with vLLM's own choice of compilation and CUDA graphs
  pressure chats all at once whose KV is three times the GPU's cache, so that requests are
           preempted: tokens recomputed, preemptions, the longest wait for a token
  pressure_tokens  the same on the small model of `tokens`: are greedy answers equal?
  tokens   greedy answers of single requests, equal with and without, on a small model of its own
  start    how long an engine takes to start (also measured with each of s1 to s4)
  startgraphs the same with vLLM's own choice of compilation and CUDA graphs, of which the first
           engine on a machine makes what the others find: --rounds 3

Each mode runs in a process of its own, one after the other, or with --side-by-side, for engines
that play S4 alone, all alive together: prepared once, they take turns phase by phase, in another
order each round, and p99 is also compared within each round. Use it where a processor's speed
changes within a minute, with short phases and many rounds. The engines share the GPU and the
memory, so each must be given its part of them, for instance on an H200 with 128 GiB of memory:

    python scripts/bench serve --model DIR --modes ours,simple,offloading --scenarios s4 \\
        --side-by-side --repeats 8 --set s4_seconds=4 --cpu-gib 28 --set gpu_blocks=5000 \\
        --set s4_prompts=12 --engine '{"gpu_memory_utilization": 0.28}' --job-timeout 150

The arriving prompts (`s4_prompts` of `s4_tokens`) must not fit into `gpu_blocks`, and must, with
what the decodes add in a round, fit into the tier. --job-timeout is then for each wait: one start,
one phase. Starts beside other engines are not counted as starts.

Results are written to --json as they come. Several runs are put together by naming the earlier
files with --merge; --modes '' only draws. `--small` runs on a CPU with a tiny model, to see that
everything works. There vLLM's connectors have copies of the benchmark's own, because theirs
need CUDA (`host_copies.py`): what is computed again can be compared, seconds cannot.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts import Refused
from scripts.bench import jobs
from scripts.bench.arguments import filled, model, positive, recorded, settings, whole, written
from scripts.bench.common import say, write_json
from scripts.bench.serve import job as job_of
from scripts.bench.serve import modes, report, side_by_side
from scripts.bench.serve import process as process_of
from scripts.bench.serve.sizes import SCENARIOS, SMALL, Sizes, with_changes


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--modes", default="off,ours,simple,offloading,lmcache")
    add("--scenarios", default="s3,s1,s4,s2,s1long,one")
    add("--rounds", type=whole(1), default=1, help="how often the modes take turns on new engines")
    add("--repeats", type=whole(1), help="repeats of S2 and S4 within an engine")
    add("--model", type=model, help="folder of a model; its config is enough, weights are random")
    add("--cpu-gib", type=positive, help="size of the tier (OffloadingConnector: 8/9 of it)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="any field of Sizes")
    add("--engine", type=settings, default={}, metavar="JSON", help="arguments of vllm.LLM")
    add(
        "--small",
        action="store_true",
        help="a CPU and a tiny model; the connectors copy as the benchmark does, not with CUDA",
    )
    add("--side-by-side", action="store_true", help="S4: all modes' engines alive together")
    add("--job-timeout", type=positive, default=400.0, metavar="S")
    add("--time-limit", type=positive, default=1e9, metavar="S", help="start no job after it")
    add("--out", type=filled, default=Path("bench-out"), help="folder for logs and files")
    add("--json", type=written, help="default: bench_serve.json in --out")
    add("--png", type=written, help="default: bench_serve.png in --out")
    earlier = recorded("machines", "sizes", "jobs")
    add("--merge", type=earlier, nargs="*", default=[], help="JSON files of earlier runs")
    return parser.parse_args()


def sizes_of(args: argparse.Namespace) -> Sizes:
    """The load that the command line asks for."""
    changes = list(args.set)
    if args.cpu_gib:
        changes += [f"cpu_gib={args.cpu_gib}", f"offloading_gib={args.cpu_gib * 8 / 9}"]
    if args.repeats:
        changes += [f"s2_repeats={args.repeats}", f"s4_repeats={args.repeats}"]
    return with_changes(SMALL if args.small else Sizes(), changes)


def split(text: str, known: Any) -> list[str]:
    """Comma-separated names; ``known`` raises Refused for one that it does not know."""
    names = [name for name in text.split(",") if name]
    for name in names:
        known(name)
    return names


def known_scenario(name: str) -> None:
    """Raise Refused unless it is one."""
    if name not in SCENARIOS:
        raise Refused(f"scenario {name!r}: expected one of {', '.join(SCENARIOS)}")


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Run all jobs; returns what was written."""
    names = split(args.modes, modes.parse)
    chosen = split(args.scenarios, known_scenario)
    if names and args.model is None:
        raise Refused("expected --model DIR, found none")
    setup = job_of.Setup(
        args.model, sizes_of(args), args.small, args.engine, args.out, args.job_timeout
    )
    document: dict[str, Any] = {"machines": [], "sizes": asdict(setup.sizes), "jobs": []}
    earlier = jobs.merge(document, args.merge)
    if earlier and not names:
        document["sizes"] = earlier[-1]["sizes"]
    planned = job_of.jobs(chosen, names, args.rounds, args.side_by_side)
    if planned:
        jobs.note_machine(document)
    if any(job.engine in job_of.SMALL_MODEL for beside in planned for job in beside):
        job_of.write_tokens_model(args.out / "model", args.small)
    play(planned, setup, args, document)
    return document


def play(
    planned: list[list[job_of.Job]],
    setup: job_of.Setup,
    args: argparse.Namespace,
    document: dict[str, Any],
) -> None:
    """Run the sets of jobs, one after the other."""

    def run(begun: list[job_of.Job], changed: Callable[[], None], late: Callable[[], bool]) -> None:
        if begun[0].together:
            side_by_side.run(begun, setup, changed, late)
        else:
            process_of.run(begun[0], setup, changed)

    jobs.play(planned, run, setup, args, document)


def main() -> int:
    """Run, print the table and the verdicts, draw."""
    args = options()
    args.json = args.json or args.out / "bench_serve.json"
    args.png = args.png or args.out / "bench_serve.png"
    # So that a job's processes are ended with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    document = bench(args)
    write_json(args.json, document)
    say("\n" + report.text(document))
    report.draw(document, args.png)
    say(f"Written: {args.json}")
    return 1 if any(job["error"] and job["tier_gib"] == 0 for job in document["jobs"]) else 0
