"""S4 with the engines of all modes alive together, taking turns phase by phase.

Where a processor's speed changes within a minute, times of processes that ran minutes apart cannot
be compared. Here the modes take turns within one round, and `pairs` compares them round
by round. While one engine plays, the others wait for a line or a request, which costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from scripts.bench.common import say
from scripts.bench.serve.arrivals import kinds_of
from scripts.bench.serve.job import Job, Setup
from scripts.bench.serve.process import Process

SETTLE_S = 0.5  # before each turn: stores of the engine before may still be under way


@dataclass
class Player:
    """An engine that waits for its turn.

    Attributes:
        kinds: the phases of a round, known once it is prepared.
    """

    process: Process[Job]
    timeout: float
    kinds: tuple[str, ...] = ()

    @property
    def scenario(self) -> str:
        """S4 on this engine."""
        return self.process.job.scenarios[0]

    def ask(self, command: str) -> Any:
        """Have it play, and return what came out; None if nothing did, then it is ended."""
        time.sleep(SETTLE_S)
        self.process.tell(f"{self.scenario} {command}")
        event = self.process.follow("played", self.timeout)
        if event is None:
            self.process.end()  # at once: it must not run beside the others
            return None
        return event["result"]

    def prepare(self) -> None:
        """Once, before the rounds."""
        self.kinds = tuple(self.ask("prepare") or ())
        if self.kinds:
            self.process.job.results[self.scenario] = {kind: [] for kind in self.kinds}

    def play(self, kind: str, changed: Callable[[], None]) -> None:
        """One phase, if its mode has such a one."""
        found = self.ask(kind) if kind in self.kinds else None
        if found is not None:
            self.process.job.results[self.scenario][kind].append(found)
            changed()


def order(players: list[Any], turn: int) -> list[Any]:
    """Who plays after whom in a round, counted from 0.

    Every second round goes backwards: if it only rotated, nearly each would always follow the same.
    """
    first = turn // 2 % len(players)
    rotated = players[first:] + players[:first]
    return rotated[::-1] if turn % 2 else rotated


def play_round(players: list[Player], kinds: list[str], changed: Callable[[], None]) -> None:
    """Each phase of all modes, one right after the other: what is compared is close in time."""
    for kind in kinds:
        for player in players:
            if not player.process.job.error:
                player.play(kind, changed)


def run(
    jobs: list[Job], setup: Setup, changed: Callable[[], None], late: Callable[[], bool]
) -> None:
    """Run the jobs of a set; one that fails does not stop the others.

    Args:
        changed: called without arguments whenever a job has more results.
        late: whether no other round is to begin.
    """
    with ExitStack() as stack:
        players = []
        for job in jobs:
            if job.skipped(changed):
                continue
            process = Process(job, setup, changed)
            stack.callback(process.end)
            # One at a time: vLLM measures free memory while it starts.
            if process.follow("ready", setup.timeout):
                players.append(Player(process, setup.timeout))
            else:
                process.end()
        for player in players:
            player.prepare()
        for turn in range(setup.sizes.s4_repeats):
            alive = [player for player in players if not player.process.job.error]
            if late() or not alive:
                say(f"Side by side: {setup.sizes.s4_repeats - turn} rounds not begun.")
                break
            kinds = dict.fromkeys(kind for player in alive for kind in player.kinds)
            chosen = kinds_of(turn, kinds, setup.sizes.s4_quiet_every)
            play_round(order(alive, turn), chosen, changed)
        for player in players:
            player.process.hang_up()  # all at once; then each is waited for
