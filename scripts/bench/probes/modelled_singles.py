"""python scripts/bench modelled_singles [--runs N] [--set NAME=VALUE,VALUE] [--json FILE]

How much of prompts that take turns is loaded, and how much the GPU has kept of them: the single
prompts that `bench chats` asks before its chats, on vLLM's own scheduler with the tier, over a
modelled GPU and bus (`modelled_engine`). Each run has prompts of its own, so other hashes: these
say which blocks the tier learns from (tier/prefix_share.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from scripts.bench import arguments
from scripts.bench.chats import load as load_of
from scripts.bench.chats.play import FILL_ANSWER
from scripts.bench.common import machine, table, write_json
from scripts.bench.probes.modelled import play
from scripts.bench.probes.modelled_engine import Engine, TierEngine
from scripts.bench.step_sides import BLOCK
from scripts.bench.varied import Varied, asked, varied


@dataclass
class _Ask:
    """A request, and from when on it comes."""

    name: str
    prompt: list[int]
    answer: int
    at: float = 0.0


class Singles:
    """Prompts are stored, some at a time, and then asked for one at a time, in the same order.

    Args:
        engine: with the tier.
        load: as `bench chats` has it.

    Attributes:
        asked: blocks of the prompts that were.
    """

    def __init__(self, engine: TierEngine, load: load_of.Load) -> None:
        texts = load_of.singles(load, "quiet")
        self._engine, self._load = engine, load
        self._stored = deque(_Ask(f"{t.name}-stored", [*t.stored], FILL_ANSWER) for t in texts)
        self._again = deque(
            _Ask(f"{t.name}-{turn}", [*t.stored, *t.extensions[turn]], t.answer)
            for turn in range(load.singles_rounds)
            for t in texts
        )
        self._coming: deque[_Ask] = deque()
        self._under_way = self._before = self.asked = 0

    @property
    def next_at(self) -> float | None:
        """When the next request comes; None if none is on its way."""
        return self._coming[0].at if self._coming else None

    @property
    def loaded(self) -> int:
        """Blocks, since the first was asked for again."""
        return self._engine.loads.blocks - self._before

    def begin(self) -> None:
        """The first requests are on their way."""
        for _ in range(min(self._load.at_once, len(self._stored))):
            self._coming.append(self._stored.popleft())

    def come(self, engine: Engine) -> None:
        """Requests that have come by now reach the scheduler."""
        while self._coming and self._coming[0].at <= engine.clock.ms:
            one = self._coming.popleft()
            self._under_way += 1
            engine.sim.ask(one.name, one.prompt, one.answer)

    def answered(self, outputs: Any, now: float) -> None:
        """Each answer has another request come, while there are any."""
        for output in outputs:
            if output.finish_reason is not None:
                self._under_way -= 1
                self._next(now)

    def _next(self, now: float) -> None:
        if self._stored:
            self._come_at(self._stored.popleft(), now)
        elif not self._under_way and not self._coming and self._again:
            if not self.asked:
                self._before = self._engine.loads.blocks
            one = self._again.popleft()
            self.asked += len(one.prompt) // BLOCK
            self._come_at(one, now + 1000 * self._load.pause_s)

    def _come_at(self, one: _Ask, at: float) -> None:
        one.at = at
        self._coming.append(one)


def shares(runs: int) -> Iterator[float]:
    """Of what was asked for again, the part that was loaded, run by run."""
    for run in range(runs):
        engine = TierEngine(1.0, by_layer=True, follows=True)
        clients = Singles(engine, load_of.Load(seed=f"singles-{run}"))
        play(engine, clients)
        yield clients.loaded / clients.asked


def report(rows: list[dict[str, Any]]) -> str:
    """A line for each value of the number."""
    lines = [("loaded, %", "median", "least", "most", "runs", "with more than half")]
    for side in dict.fromkeys(row["side"] for row in rows):
        own = [100 * row["loaded"] for row in rows if row["side"] == side]
        middle = (statistics.median(own), min(own), max(own))
        many = sum(one > 50 for one in own)
        lines.append((side, *(f"{value:.0f}" for value in middle), str(len(own)), str(many)))
    return table(lines)


def _sides(number: Varied | None) -> dict[str, Any]:
    if number is None:
        return {"as it is": nullcontext}
    return {
        f"{number.name} {value:g}": partial(varied, number.name, value) for value in number.values
    }


def main() -> int:
    """Play every run with every value; a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=arguments.whole(1), default=40)
    parser.add_argument("--set", type=asked, metavar="NAME=VALUE,VALUE")
    parser.add_argument("--json", type=arguments.written, metavar="FILE")
    args = parser.parse_args()
    document: dict[str, Any] = {"machines": [machine()], "rows": []}
    for side, differs in _sides(args.set).items():
        with differs():
            for run, loaded in enumerate(shares(args.runs)):
                document["rows"].append({"side": side, "run": run, "loaded": loaded})
                print(f"{side}, run {run}: {100 * loaded:.0f} %", file=sys.stderr)
    print(report(document["rows"]))
    if args.json:
        write_json(args.json, document)
    return 0
