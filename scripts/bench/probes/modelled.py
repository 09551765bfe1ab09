"""python scripts/bench modelled [--seeds N] [--slower TIMES,TIMES] [--json FILE]
           [--stall MS,MS] [--heads] [--set NAME=VALUE,VALUE]

Chats on vLLM's own scheduler with the tier, over a modelled GPU and bus (`modelled_engine`): what
its decisions about loads are worth, on a machine without a GPU, and where loads take longer than
they took when the tier was opened, because others use the bus or the host is late. The load is that
of `bench chats`: 72 chats, 12 at a time, each back as soon as it is answered.

  floor            plain vLLM whose GPU holds everything
  start            with the tier, by the time that a load took when the tier was opened
  followed         by what loads take lately, as workers say
  ..., whole       loads awaited as a whole instead of layer by layer
  stall MS         `followed` with this KVOFFLOAD_MAX_STALL_MS, in place of all but the floor
  heads, prefixes  with --heads: `followed` with KVOFFLOAD_GPU_PREFIXES=auto and whole, in place of
                   all but the floor
  NAME VALUE       with --set: `followed` with this value of a number of a `tuning.py`, in place of
                   all but the floor

Times are the model's: compare them with each other. With PYTHONHASHSEED=0 before it a run can be
repeated; otherwise hashes of blocks differ from run to run, and with them some figures.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol
from unittest import mock

from scripts.bench import arguments
from scripts.bench.common import machine, quantile, table, write_json
from scripts.bench.probes.modelled_engine import Engine, TierEngine, output_of, samples
from scripts.bench.varied import Varied, asked, varied

CHATS, AT_ONCE, TURNS = 72, 12, 4
HISTORY, NEW, ANSWER = (4000, 7000), (60, 180), (32, 96)  # tokens
CLIENT_MS = (4.0, 6.0)  # between an answer and the next request
SLOWER = (1.0, 2.0, 4.0)
# Title: whether loads come by layer, and whether what they take is followed.
SIDES = {
    "start": (True, False),
    "followed": (True, True),
    "start, whole": (False, False),
    "followed, whole": (False, True),
}
# What the GPU keeps.
KEPT = {"prefixes": "whole", "heads": "auto"}


class Asked(NamedTuple):
    """A request: when it came, and when each token of its answer did, in ms."""

    came: float
    tokens: list[float]


class Clients(Protocol):
    """Who asks a modelled engine."""

    @property
    def next_at(self) -> float | None:
        """When the next request comes; None if none is on its way."""

    def begin(self) -> None:
        """The first requests are on their way."""

    def come(self, engine: Engine) -> None:
        """Requests that have come by now reach the scheduler."""

    def answered(self, outputs: Any, now: float) -> None:
        """What a step has given."""


class Chats:
    """Chats in turn, so many at a time."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._chats = [self._tokens(HISTORY) for _ in range(CHATS)]
        turns = [(chat, turn) for turn in range(TURNS) for chat in range(CHATS)]
        self._turns = deque(turns)
        self._coming: deque[tuple[float, int, int]] = deque()
        self.asked: dict[str, Asked] = {}

    @property
    def next_at(self) -> float | None:
        """When the next request comes; None if none is on its way."""
        return self._coming[0][0] if self._coming else None

    def begin(self) -> None:
        """The first requests are on their way."""
        for at in range(AT_ONCE):
            self._next(float(at))

    def come(self, engine: Engine) -> None:
        """Requests that have come by now reach the scheduler."""
        while self._coming and self._coming[0][0] <= engine.clock.ms:
            at, chat, turn = self._coming.popleft()
            name = f"{chat} {turn}"
            self.asked[name] = Asked(at, [])
            engine.sim.ask(name, list(self._chats[chat]), self._random.randint(*ANSWER))

    def answered(self, outputs: Any, now: float) -> None:
        """Tokens of answers; a chat that is answered goes on, another one comes."""
        for output in outputs:
            self.asked[output.request_id].tokens.extend(now for _ in output.new_token_ids)
            if output.finish_reason is not None:
                chat = int(output.request_id.partition(" ")[0])
                answer = [11] * len(self.asked[output.request_id].tokens)
                self._chats[chat] += answer + self._tokens(NEW)
                self._next(now + self._random.uniform(*CLIENT_MS))

    def later(self) -> list[Asked]:
        """The requests of later turns."""
        return [asked for name, asked in self.asked.items() if not name.endswith(" 0")]

    def _next(self, at: float) -> None:
        if self._turns:
            self._coming.append((at, *self._turns.popleft()))
            self._coming = deque(sorted(self._coming))

    def _tokens(self, many: tuple[int, int]) -> list[int]:
        return [self._random.randrange(1000, 32_000) for _ in range(self._random.randint(*many))]


def played(engine: Engine, seed: int) -> dict[str, float]:
    """Figures of later turns: milliseconds, and tokens a second."""
    chats = Chats(seed)
    play(engine, chats)
    return {**figures(chats.later()), "waited": engine.waited_ms}


def play(engine: Engine, clients: Clients) -> None:
    """Let clients ask, until none has anything to ask and all are answered."""
    scheduler = engine.sim.scheduler
    clients.begin()
    under_way: deque[tuple[Any, dict[str, bool], float]] = deque()
    while under_way or clients.next_at is not None or scheduler.has_unfinished_requests():
        clients.come(engine)
        if scheduler.has_unfinished_requests() and len(under_way) < 2:
            step = scheduler.schedule()
            under_way.append((step, samples(scheduler, step), engine.play(step)))
            if len(under_way) < 2 and step.total_num_scheduled_tokens:
                engine.clock.ms += engine.costs.begin
                continue
        if under_way:
            step, sampled, end = under_way.popleft()
            engine.clock.ms = max(engine.clock.ms, end) + engine.costs.output
            output = output_of(step, sampled)
            engine.answer(step, output)
            for outputs in scheduler.update_from_output(step, output).values():
                clients.answered(outputs.outputs, engine.clock.ms)
        elif clients.next_at is not None:
            engine.clock.ms = max(engine.clock.ms, clients.next_at)


def figures(asked: list[Asked]) -> dict[str, float]:
    """What is told of requests: first token, time per token, gaps, and tokens a second."""
    first = [one.tokens[0] - one.came for one in asked]
    each = [(one.tokens[-1] - one.tokens[0]) / (len(one.tokens) - 1) for one in asked]
    whole = [one.tokens[-1] - one.came for one in asked]
    gaps = [b - a for one in asked for a, b in zip(one.tokens, one.tokens[1:])]
    took = max(one.tokens[-1] for one in asked) - min(one.came for one in asked)
    return {
        "first_p50": quantile(first, 0.5),
        "first_p99": quantile(first, 0.99),
        "token_p50": quantile(each, 0.5),
        "whole_p50": quantile(whole, 0.5),
        "gap_largest": max(gaps),
        "tokens_a_second": 1000 * sum(len(one.tokens) for one in asked) / took,
    }


ROWS = {
    "first_p50": "first token, p50, ms",
    "first_p99": "first token, p99, ms",
    "token_p50": "per output token, p50, ms",
    "whole_p50": "whole answer, p50, ms",
    "gap_largest": "between tokens, largest, ms",
    "tokens_a_second": "tokens answered a second",
    "waited": "steps waited for loads, ms in all",
}


def report(rows: list[dict[str, Any]]) -> str:
    """A table for each speed of the bus, the floor first; medians over the seeds."""
    floor = [row for row in rows if row["side"] == "floor"]
    parts = []
    for slower in dict.fromkeys(row["slower"] for row in rows if row not in floor):
        here = [row for row in rows if row["slower"] == slower and row not in floor]
        names = dict.fromkeys(row["side"] for row in here)
        sides = {"floor": floor, **{n: [r for r in here if r["side"] == n] for n in names}}
        lines = [(f"loads take {slower:g} times what they took at the start", *sides)]
        for name, title in ROWS.items():
            middle = [statistics.median(row[name] for row in of) for of in sides.values()]
            lines.append((title, *map(_digits, middle)))
        parts.append(table(lines))
    return "\n\n".join(parts)


def _digits(value: float) -> str:
    return f"{value:.3g}" if 0.5 <= value < 1000 else f"{value:.0f}"


# What is different while a side is played: entered when it begins, left when it has ended.
Others = dict[str, Callable[[], AbstractContextManager[Any]]]


def engines(others: Others, speeds: Sequence[float]) -> Iterator[tuple[str, float, Engine]]:
    """What is played: a name, how slow loads are, and the engine, made when it is asked for.

    Args:
        others: by the name of a side: these are played instead of `SIDES`.
        speeds: what loads take, in times of what they took when the tier was opened.
    """
    yield "floor", 1.0, Engine()
    for slower in speeds:
        for side, differs in others.items():
            with differs():
                yield side, slower, TierEngine(slower, *SIDES["followed"])
        for side, how in SIDES.items() if not others else ():
            yield side, slower, TierEngine(slower, *how)


def _stalls(text: str) -> list[str]:
    given = [ms for ms in text.split(",") if ms]
    for ms in given:
        arguments.least_zero(ms)
    return given


def others_of(stalls: Sequence[str], heads: bool, number: Varied | None) -> Others:
    """The sides that the command line asks for in place of `SIDES`."""
    variables = {f"stall {ms}": {"KVOFFLOAD_MAX_STALL_MS": ms} for ms in stalls}
    if heads:
        variables |= {side: {"KVOFFLOAD_GPU_PREFIXES": how} for side, how in KEPT.items()}
    found: Others = {
        side: partial(mock.patch.dict, os.environ, values) for side, values in variables.items()
    }
    for value in number.values if number else ():
        found[f"{number.name} {value:g}"] = partial(varied, number.name, value)
    return found


def _speeds(text: str) -> list[float]:
    return [arguments.positive(part) for part in text.split(",")]


def main() -> int:
    """Play every side at every speed; tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=arguments.whole(1), default=3)
    parser.add_argument("--stall", type=_stalls, default="", metavar="MS,MS")
    parser.add_argument("--heads", action="store_true")
    parser.add_argument("--slower", type=_speeds, default=SLOWER, metavar="TIMES,TIMES")
    parser.add_argument("--set", type=asked, metavar="NAME=VALUE,VALUE")
    parser.add_argument("--json", type=arguments.written, metavar="FILE")
    args = parser.parse_args()
    others = others_of(args.stall, args.heads, args.set)
    document: dict[str, Any] = {"machines": [machine()], "rows": []}
    for seed in range(args.seeds):
        for side, slower, engine in engines(others, args.slower):
            found = {"side": side, "slower": slower, "seed": seed, **played(engine, seed)}
            document["rows"].append(found)
            print(f"seed {seed}, {side}, {slower:g}: {found['first_p50']:.1f} ms", file=sys.stderr)
    print(report(document["rows"]))
    if args.json:
        write_json(args.json, document)
    return 0
