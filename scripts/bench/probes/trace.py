"""python scripts/bench trace --model DIR [--seconds 300] [--json FILE]

Conversations with one engine, traced from outside: where the time of a first token goes, what each
mechanism for speed is worth, and what an ideal tier would take.

So many chats at a time, each asked again with a new message when one is answered; together they
are more than the GPU cache holds. Every 2.5 s something else is switched: all mechanisms on, one of
them off (`nothing` is a control that must show nothing), or the floor, which is the tier paused and
chats that the GPU holds. A cycle plays each of
these once, in a seeded order, and `on` more often; what lies beside a whole cycle does not count.
--seconds is for everything, the engine's start included.

The tier must be armed: `python -m kvoffload_patch --cpu-gib 72 python scripts/bench trace ...`.
Events go to a file as they come (--events); --read makes the tables from such a file, of a run that
was cut off as well. --small plays a tiny model on a CPU, which shows that it works and no more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts import Refused
from scripts.bench import arguments
from scripts.bench.arguments import least_zero, positive, settings, whole, written
from scripts.bench.common import lacks_tier, machine, say, write_json
from scripts.bench.probes import observers, trace_report
from scripts.bench.probes.closed_loop import Asked, ClosedLoop
from scripts.bench.probes.switches import MECHANISMS
from scripts.bench.probes.trace_events import read
from scripts.bench.probes.trace_figures import FLOOR, ON, Figures
from scripts.bench.probes.trace_joins import joins_alone
from scripts.bench.serve.load import cached, sampling

ENGINE = {
    "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 40_000,
    "num_gpu_blocks_override": 12_000, "disable_log_stats": True, "seed": 0,
}  # fmt: skip
SMALL_ENGINE = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "max_num_seqs": 16,
    "num_gpu_blocks_override": 40,
}  # fmt: skip
SMALL_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    # Else vLLM's CPU build has its only worker in a process of its own.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip
SMALL = {
    "chats": 20, "floor_chats": 4, "at_once": 4, "history": (400, 700), "new": (10, 40),
    "answer": (8, 14), "vocabulary": 1000, "period": 1.5, "settle": 0.5, "on": 1,
}  # fmt: skip
SWITCHED = "nothing,joining early,joining into a stall"
RESERVE_S = 12.0  # for the figures, at the end
FOUND, FILL_TRIES = 0.99, 5
WARM_UP_S = 2.0


class Player:
    """The chats, and what is asked of the engine.

    Args:
        llm: a `vllm.LLM`.
    """

    def __init__(self, llm: Any, options: argparse.Namespace) -> None:
        self._llm, self._options = llm, options
        self._random = random.Random(options.seed)
        self._chats = [self._history() for _ in range(options.chats)]
        self._floor_chats = [self._history() for _ in range(options.floor_chats)]
        self._sets = {name: itertools.cycle(chats) for name, chats in
                      ((ON, self._chats), (FLOOR, self._floor_chats))}  # fmt: skip
        self._set = ON
        self._asked = 0
        self._loop = ClosedLoop(llm.llm_engine, options.at_once, self._ask)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(5, self._options.vocabulary) for _ in range(count)]

    def _history(self) -> list[int]:
        return self._tokens(self._random.randint(*self._options.history))

    def _ask(self) -> Asked:
        history = next(self._sets[self._set])
        self._asked += 1
        new = self._tokens(self._random.randint(*self._options.new))
        answer = self._random.randint(*self._options.answer)
        return observers.request_name(self._asked, len(history)), history + new, answer

    def fill(self, block_tokens: int) -> float:
        """Ask for every history, until nearly all is found again; the share that was."""
        histories = self._chats + self._floor_chats
        whole = sum(len(h) // block_tokens * block_tokens for h in histories)
        share = 0.0
        for turn in range(FILL_TRIES):
            prompts = [{"prompt_token_ids": history + self._tokens(1)} for history in histories]
            share = cached(self._llm.generate(prompts, sampling(1), use_tqdm=False)) / whole
            say(f"turn {turn} of all histories: {share:.1%} found")
            if share >= FOUND:
                break
            time.sleep(self._options.settle)
        return share

    def cycle(self, number: int) -> None:
        """Play every variant, in an order that is drawn."""
        floor = [FLOOR] if self._floor_chats else []
        names = [*self._options.only, *[ON] * self._options.on, *floor]
        self._random.shuffle(names)
        for name in names:
            if name == FLOOR:
                self._to_the_floor(number)
            self._begin(number, name, paused=name == FLOOR)
            self.play(self._options.period)
            self._set = ON
        self._begin(number, "")

    def play(self, seconds: float) -> None:
        """Go on for so long."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            self._loop.fill()
            self._loop.step()

    def _to_the_floor(self, cycle: int) -> None:
        """Bring the floor's chats onto the GPU, not their heads alone."""
        self._begin(cycle, "", off="heads of prefixes")
        self._set, before = FLOOR, self._asked
        while self._asked < before + len(self._floor_chats) + self._options.at_once:
            self._loop.fill()
            self._loop.step()

    def _begin(self, cycle: int, variant: str, paused: bool = False, off: str = "nothing") -> None:
        off = variant if variant in MECHANISMS else off
        arguments = cycle, variant, off, paused
        self._llm.collective_rpc(observers.begin_period, args=arguments)

    def end(self) -> None:
        """Return when everything is answered and written down."""
        self._loop.drain()
        self._llm.collective_rpc(observers.detach)


def play(options: argparse.Namespace, began: float) -> None:
    """Start the engine, and play cycles as long as there is time for one more."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm import LLM

    llm = LLM(options.model, **options.engine)
    say(f"engine: {time.perf_counter() - began:.1f} s")
    [about] = llm.collective_rpc(observers.attach, args=(str(options.events),))
    say(f"traced: {about}")
    player = Player(llm, options)
    player.fill(about["block_tokens"])
    player.play(WARM_UP_S)
    cycle_s, number = 0.0, 0
    while time.perf_counter() - began + cycle_s < options.seconds - RESERVE_S or not number:
        number, at = number + 1, time.perf_counter()
        player.cycle(number)
        cycle_s = max(cycle_s, time.perf_counter() - at)
        say(f"cycle {number}: {cycle_s:.1f} s, {time.perf_counter() - began:.0f} s so far")
    player.end()


def document_of(events: Path) -> dict[str, Any]:
    """The result that a file of events has."""
    with events.open() as lines:
        trace = read(lines)
    if "options" not in trace.about:
        raise Refused(
            f"expected the events of a run in {events}, found none; give its file of events"
        )
    options = trace.about["options"]
    figures = Figures(trace, options["drop"], options["guard"]).document()
    figures["alone"] = joins_alone(trace, options["drop"])
    return {**{key: trace.about[key] for key in ("machine", "options")}, "figures": figures}


def options_given() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="folder of the model; with --small, one is written where there is none")
    add("--engine", type=settings, default={}, help="more arguments of vllm.LLM, as JSON")
    add("--seconds", type=positive, default=300.0, help="for everything")
    add("--only", default=SWITCHED, help="what is switched, by commas; or ''")
    add("--chats", type=whole(1), default=48, help="more than the GPU cache holds")
    add(
        "--floor-chats",
        type=whole(0),
        default=20,
        help="fewer than it holds; 0: no floor is played",
    )
    add("--at-once", type=whole(1), default=12)
    add("--period", type=positive, default=2.5, help="seconds between two switches")
    add("--drop", type=least_zero, default=0.3, help="of these, the first that do not count")
    add("--guard", type=least_zero, default=0.1, help="and the last in which arrivals do not")
    add("--on", type=whole(1), default=2, help="periods of a cycle with all on")
    add("--history", type=whole(1), nargs=2, default=(4000, 7000), help="least and most tokens")
    add("--new", type=whole(1), nargs=2, default=(60, 180))
    add("--answer", type=whole(1), nargs=2, default=(32, 96))
    add("--vocabulary", type=whole(1), default=100_000)
    add("--settle", type=least_zero, default=4.0, help="seconds between turns that fill the tier")
    add("--seed", type=int, default=0)
    add("--small", action="store_true")
    add("--json", type=written, help="where the result goes")
    add("--events", type=written, help="where the events go; default: beside --json")
    add("--read", type=arguments.read, help="play nothing: the tables of this file of events")
    return _checked(parser, parser.parse_args())


def _checked(parser: argparse.ArgumentParser, given: argparse.Namespace) -> argparse.Namespace:
    if not given.read and not given.model and not given.small:
        parser.error("expected --model, --small or --read")
    if given.model and not given.small and not Path(given.model, "config.json").is_file():
        parser.error(f"--model: expected a folder with a config.json, found {given.model!r}")
    given.only = [name for name in given.only.split(",") if name]
    if unknown := set(given.only) - set(MECHANISMS):
        parser.error(f"--only: expected some of {', '.join(MECHANISMS)}, found {min(unknown)}")
    return given


def prepare(options: argparse.Namespace) -> None:
    """Fill in what depends on other options, and begin the file of events."""
    folder = options.json.parent if options.json else Path(tempfile.mkdtemp(prefix="trace-"))
    folder.mkdir(parents=True, exist_ok=True)
    stem = options.json.stem if options.json else "trace"
    options.events = options.events or folder / f"{stem}.events.jsonl"
    options.engine = {**(SMALL_ENGINE if options.small else ENGINE), **options.engine}
    if options.small:
        from scripts.bench.serve.job import write_tokens_model

        vars(options).update(SMALL)
        os.environ.update(SMALL_ENVIRONMENT)
        if not options.model:
            options.model = str(folder / "model")
            write_tokens_model(Path(options.model), small=True)
    kept = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
    event = [time.perf_counter(), "about", {"machine": machine(), "options": kept}]
    options.events.write_text(json.dumps(event) + "\n")


def main() -> int:
    """Play, or read what was played; print and write the tables."""
    began = time.perf_counter()
    options = options_given()
    if options.read is None:
        if lacks_tier("trace"):
            return 2
        prepare(options)
        say(f"events: {options.events}")
        play(options, began)
    document = document_of(options.read or options.events)
    write_json(options.json, document)
    parts = [trace_report.page(document), trace_report.EXPLAINED]
    say("\n\n".join([*parts, trace_report.bound(document), trace_report.slowest(document)]))
    return 0
