"""python scripts/bench step [--quick] [--json FILE] [--only a,d,...] [--sides plain,tier,...]

What the CPU tier adds to a scheduler step on the host, beside vLLM's own connectors to CPU memory.
`tier` is as the environment says, `eager` the same with KVOFFLOAD_STORE=eager; `lru`, `arc` and
`s3fifo` are with that KVOFFLOAD_EVICTION, `whole` is with that KVOFFLOAD_GPU_PREFIXES; `hooks` has
its hooks, which do nothing.

vLLM's own scheduler, no model, no copies. The schedulers of one scenario take turns, in another
order each round: plain, one with a tier attached, one for each connector. A step is `schedule()`
and `update_from_output()`, timed in CPU time of the thread; what stands for the model in between
is in `step_sides`. "Added" is the median over rounds of the difference between a side's mean step
and plain's in the same round: a step may do what others have put off. Needs an installed vLLM that
the tier accepts.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from itertools import count, islice, repeat
from operator import sub
from typing import Any

from scripts.bench import arguments
from scripts.bench.common import machine, table, verdict, write_json
from scripts.bench.step_sides import BLOCK, SIDES, Sim, TierSim

# A scenario readies a scheduler and returns what is to be done, untimed, before each step.
Before = Iterator[None]
Make = type[Sim]


def decodes(make: Make, quick: bool, waiting: int = 0) -> tuple[Sim, Before]:
    """256 running requests in all run slots; they fill 16 blocks in a step between them."""
    sim = make(slots=256)
    for seed in range(256):
        sim.add(seed, 256 + seed % BLOCK, 10_000)
    sim.run_until(256)
    for seed in range(1000, 1000 + waiting):
        sim.add(seed, 256, 10)
    return sim, repeat(None)


def no_room(make: Make, quick: bool, in_cpu: bool = False, parked: bool = False) -> Any:
    """64 running, 1,000 waiting for 512 blocks each, of which fewer than 500 are left.

    With ``in_cpu``, the tier has the whole prompt of the first that waits. With ``parked``, one
    more request waits in front of them for a load, in blocks of its own, that never ends.
    """
    parked_blocks = 128 if parked and issubclass(make, TierSim) else 0
    sim = make(slots=256, blocks=680 + parked_blocks)
    for seed, tokens in ((1000 if in_cpu else 998, 8192), (999, 2064), (997, 10_500)):
        sim.add(seed, tokens, 1)  # the last one takes the GPU blocks of those before it
        while sim.scheduler.has_unfinished_requests():
            sim.step()
    for seed in range(64):
        sim.add(seed, 32 + seed % BLOCK, 10_000)
    sim.run_until(64)
    if parked_blocks:
        sim.loads_end = False
        sim.add(999, 2064, 1)
        sim.step()
    for seed in range(1000, 2000):
        sim.add(seed, 8192, 10)
    return sim, repeat(None)


def prefills(
    make: Make, quick: bool, tokens: int, prompts: int = 10**6, together: int = 1
) -> tuple[Sim, Before]:
    """A request a step, or several, done with it: the prompts in turn.

    Each is gone from the GPU by its next, but for 150 prompts or fewer.
    """
    sim = make(slots=256)

    def one_more() -> Before:
        for n in count(step=together):
            for seed in range(n, n + together):
                sim.add(seed % prompts, tokens, 1)
            yield

    before = one_more()
    for _ in range(min(prompts, 300 if quick else 800)):
        next(before)
        sim.step()
    return sim, before


def crowd(make: Make, quick: bool) -> tuple[Sim, Before]:
    """256 running with answers of 64 to 448 tokens: each that ends makes room for another one."""
    sim, lengths, seeds = make(slots=256, blocks=12_000), random.Random(0), count()

    def fill_up() -> Before:
        while True:
            while len(sim.scheduler.requests) < 257:
                sim.add(next(seeds), 128, lengths.randrange(64, 448))
            yield

    before = fill_up()
    for _ in islice(before, 300 if quick else 800):
        sim.step()
    return sim, before


ALL, OURS = tuple(SIDES), ("plain", "tier", "eager")
# Name: title, what readies it, its options, steps of a turn, sides that take part.
Scenario = tuple[str, Callable[..., tuple[Sim, Before]], dict[str, Any], int, tuple[str, ...]]
SCENARIOS: dict[str, Scenario] = {
    "a": ("256 decode, 0 wait, 16 blocks stored", decodes, {}, 15, ALL),
    "b1k": ("256 decode, 1,000 wait for run slots", decodes, {"waiting": 1000}, 15, OURS),
    "b10k": ("256 decode, 10,000 wait for run slots", decodes, {"waiting": 10_000}, 15, OURS),
    "c": ("64 decode, 1,000 wait for blocks", no_room, {}, 4, OURS),
    "c-hit": ("c, the tier has the first one's 512 blocks", no_room, {"in_cpu": True}, 4, OURS),
    "c-parked": ("c, behind a parked load under way", no_room, {"parked": True}, 4, OURS),
    "d": ("prefill of 2,048 tokens, 128 blocks stored, as many evicted",
          prefills, {"tokens": 2048}, 15, ALL),
    "e": ("prompt of 2,065 tokens, 129 blocks found",
          prefills, {"tokens": 2065, "prompts": 300}, 15, ALL),
    "e-full": ("prompt of 2,064 tokens, 129 blocks found",
               prefills, {"tokens": 2064, "prompts": 300}, 15, ALL),
    "f": ("256 run, about one ends and another begins", crowd, {}, 60, ALL),
    "g": ("2 prompts of 2,065 tokens, 129 blocks of each found on the GPU",
          prefills, {"tokens": 2065, "prompts": 100, "together": 2}, 15, OURS),
}  # fmt: skip
TIMES_MADE = 8  # of the schedulers of a scenario
# Microseconds added: to a step of 256 decodes; for a block stored and one evicted; for one
# that is loaded, or found on the GPU because its prefix is kept there in part.
TARGETS = {"a": ("a step", 60.0), "d": ("a block", 1.3), "e": ("a block", 2.0)}


def chunk(sim: Sim, before: Before, steps: int) -> list[float]:
    """The times of some steps."""
    gc.collect()
    return [sim.step() for _ in islice(before, steps + 1)][1:]  # the first after the others' turns


def measure(name: str, sides: list[str], rounds: int, quick: bool) -> dict[str, Any]:
    """One scenario: its schedulers in turns; microseconds a step.

    Where a scheduler's objects come to lie makes up to 15 µs of a step, more if it is made later.
    So they are made several times, in another order each time, for their share of the rounds.
    """
    title, _, _, steps, taking_part = SCENARIOS[name]
    steps, sides = 3 if quick else steps, [side for side in sides if side in taking_part]
    times: dict[str, list[list[float]]] = {side: [] for side in sides}
    moved = dict.fromkeys(sides, (0, 0, 0))
    made = min(rounds, TIMES_MADE)
    share = -(-rounds // made)
    for order in _orders(sides, made):
        for side, counts in _played(name, order, share, steps, quick, times).items():
            moved[side] = tuple(map(sum, zip(moved[side], counts)))
    turns = made * share
    row: dict[str, Any] = {"name": name, "title": title, "steps": turns * steps, "sides": {}}
    for side in sides:
        a_step = [count / turns / (steps + 1) for count in moved[side]]
        row["sides"][side] = _side(times[side], times["plain"], *a_step)
    return row


def _orders(sides: list[str], made: int) -> Iterator[list[str]]:
    """Orders in which they are made: each is early and late equally often."""
    for time in range(made):
        first = time // 2 * 2 * len(sides) // made
        order = sides[first:] + sides[:first]
        yield order[::-1] if time % 2 else order


def _played(
    name: str, sides: list[str], rounds: int, steps: int, quick: bool,
    times: dict[str, list[list[float]]],
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """Schedulers made in this order, in turns; adds their times, returns blocks as `_blocks`.

    The order of the turns is another one in each round.
    """
    _, ready, options, _, _ = SCENARIOS[name]
    sims = {side: ready(SIDES[side], quick, **options) for side in sides}
    gc.collect()
    gc.freeze()
    before = {side: _blocks(sims[side][0]) for side in sides}
    for turn in range(rounds):
        for place in range(len(sides)):
            side = sides[(turn + place) % len(sides)]
            times[side].append(chunk(*sims[side], steps))
    gc.unfreeze()
    return {side: tuple(map(sub, _blocks(sims[side][0]), before[side])) for side in sides}


def _blocks(sim: Sim) -> tuple[int, ...]:
    """Stored, loaded and found until now."""
    return sim.stored, sim.loaded, sim.found


def _side(
    times: list[list[float]],
    plain: list[list[float]],
    stored: float,
    loaded: float,
    found: float,
) -> dict[str, Any]:
    every = [t for turn in times for t in turn]
    added = [statistics.fmean(a) - statistics.fmean(b) for a, b in zip(times, plain)]
    low, middle, high = statistics.quantiles(added, n=4)
    return {
        "median": statistics.median(every),
        "p95": statistics.quantiles(every, n=20)[-1],
        "added": middle,
        "added_quartiles": [low, high],
        "added_by_round": added,
        "stored": stored,
        "loaded": loaded,
        "found": found,
        "added_a_block": middle / (stored + found) if stored + found else None,
    }


def page(document: dict[str, Any]) -> str:
    """A run in Markdown, a line for each scheduler of a scenario, and what the tier should add."""
    said = "\n".join(f"- {line.strip()}" for line in verdicts(document["rows"]))
    return f"{report(document['rows'])}\n\nThe tier's goals:\n\n{said}"


def report(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown, a line for each scheduler."""
    lines = [
        ("scenario, µs of a step", "scheduler", "median", "p95", "added", "half of the rounds",
         "blocks stored", "loaded", "found", "added a block"),
    ]  # fmt: skip
    for row in rows:
        for side, found in row["sides"].items():
            low, high = found["added_quartiles"]
            compared, a_block = side != "plain", found["added_a_block"]
            lines.append((
                f"{row['name']}: {row['title']}", side,
                f"{found['median']:.0f}", f"{found['p95']:.0f}",
                f"{found['added']:.0f}" if compared else "",
                f"{low:.0f} to {high:.0f}" if compared else "",
                f"{found['stored']:.0f}", f"{found['loaded']:.0f}",
                f"{found.get('found', found['loaded']):.0f}",  # results of old do not say it
                f"{a_block:.2f}" if compared and a_block else "",
            ))  # fmt: skip
    return table(lines)


def goals(rows: list[dict[str, Any]]) -> str:
    """What each scheduler adds where the tier has a goal."""
    played = set().union(*[row["sides"] for row in rows])
    names = [side for side in SIDES if side != "plain" and side in played]
    lines = [["added, µs", "goal of the tier", *names]]
    for row in rows:
        if row["name"] in TARGETS:
            unit, most = TARGETS[row["name"]]
            found = [_added(row, side) for side in names]
            cells = ["-" if v is None else f"{v:.{2 if v < 100 else 0}f}" for v in found]
            lines.append([f"to {unit}: {row['title']}", f"{most:g}", *cells])
    return table(lines)


def _added(row: dict[str, Any], side: str) -> float | None:
    """Microseconds added to a step or to a block, as the goal of the row has it."""
    unit, _ = TARGETS[row["name"]]
    found = row["sides"].get(side)
    return None if found is None else found["added" if unit == "a step" else "added_a_block"]


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """The tier beside what it may add."""
    said = []
    for row in rows:
        found = _added(row, "tier") if row["name"] in TARGETS else None
        if found is not None:
            unit, most = TARGETS[row["name"]]
            said.append(verdict(f"{row['name']}, added to {unit}", found, most, " µs"))
    return said


def main() -> None:
    """The command line."""
    assert __doc__
    parser = argparse.ArgumentParser(
        prog="scripts/bench step", description=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a few steps: does it run at all?")
    parser.add_argument(
        "--json", metavar="FILE", type=arguments.written, help="write the numbers there"
    )
    parser.add_argument(
        "--only",
        type=arguments.some(SCENARIOS),
        default=",".join(SCENARIOS),
        help="scenarios, by name",
    )
    parser.add_argument(
        "--sides",
        type=arguments.some(SIDES),
        default=",".join(SIDES),
        help="schedulers; plain is always one",
    )
    parser.add_argument(
        "--rounds",
        type=arguments.whole(2),
        metavar="TURNS",
        help="turns of each scheduler (2 or more: their spread is said)",
    )
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM is not imported yet
    rounds = args.rounds or (2 if args.quick else 40)
    sides = [side for side in SIDES if side == "plain" or side in args.sides]
    document: dict[str, Any] = {"machine": machine(), "rounds": rounds, "rows": []}
    for name in args.only:
        print(f"{name}: {SCENARIOS[name][0]}", file=sys.stderr, flush=True)
        document["rows"].append(measure(name, sides, rounds, args.quick))
        write_json(args.json, document)
    print(f"\n{page(document)}")
