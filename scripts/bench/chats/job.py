"""The jobs of `bench chats`: each a mode on a server of its own, and which of them run together."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvoffload_patch.cli.bench.server import free_port
from scripts.bench.chats import bound, server
from scripts.bench.chats.server import Setup
from scripts.bench.jobs import AnyJob, Launch
from scripts.bench.serve import modes

CHILD = "scripts.bench.chats.child"


@dataclass
class Job(AnyJob):
    """A mode, in a round of all modes.

    Attributes:
        gpu: the devices that its server may see; empty for all.
        slot: number among those that run side by side.
        run: the same for all jobs of one command and round; times of these are compared first.
    """

    mode: str
    round: int
    run: str
    gpu: str = ""
    slot: int = 0
    _log: Path = field(default=Path(), init=False)

    @property
    def name(self) -> str:
        """For people, and for file names."""
        return f"chats-{self.mode}-{self.round}"

    def unavailable(self) -> str:
        """Why its mode cannot run here; empty if it can."""
        return modes.unavailable(server.engine_mode(self.mode))

    def launch(self, setup: Setup, spec: Path, events: Path) -> Launch:
        """Write what the process is told, and say how it is started."""
        port = free_port()
        self._log = events.with_suffix(".log")
        told = {
            "command": server.command(self.mode, setup, port),
            "port": port,
            "load": asdict(setup.load),
            "times": setup.times,
            "out": str(events.resolve()),
        }
        spec.write_text(json.dumps(told))
        gib = server.tier_gib(self.mode, setup.load)
        return Launch(
            [sys.executable, "-m", CHILD, str(spec.resolve())],
            server.environment(self.mode, setup, self.gpu, self.slot),
            True,
            f"{gib:g} GiB of CPU memory" + (f", GPU {self.gpu}" if self.gpu else ""),
        )

    def record(self, setup: Setup) -> dict[str, Any]:
        """For JSON."""
        return {
            "mode": self.mode,
            "round": self.round,
            "run": self.run,
            "gpu": self.gpu,
            "tier_gib": server.tier_gib(self.mode, setup.load),
            "arguments": server.arguments(self.mode, setup),
            "load": asdict(setup.load),
            "start_s": self.start_s,
            "ms_per_block": bound.ms_per_block(self._log),
            "results": self.results,
            "error": self.error,
        }


def jobs(names: list[str], rounds: int, run: str, gpus: list[str]) -> list[list[Job]]:
    """All jobs in order, as sets of those that run side by side.

    Args:
        names: modes.
        rounds: how often all of them are played, each time on new servers.
        run: name of this command's run.
        gpus: as many modes at a time as these shares, one on each; modes change places each round.
            Without any, one mode at a time, which sees what this process sees.
    """
    width, sets = max(1, len(gpus)), []
    for turn in range(1, rounds + 1):
        for first in range(0, len(names), width):
            made = []
            for number, mode in enumerate(names[first : first + width]):
                slot = (number + turn - 1) % width
                gpu = gpus[slot] if gpus else ""
                made.append(Job(mode, turn, f"{run} {turn}", gpu, slot))
            sets.append(made)
    return sets
