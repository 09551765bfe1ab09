"""What jobs of `bench serve` and `bench chats` share, and how sets of them follow one another."""

from __future__ import annotations

import argparse
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from scripts.bench.common import machine, say, write_json


@dataclass
class Launch:
    """What a job's process is started with.

    Attributes:
        words: the command line.
        asked: whether its standard input says what to do.
        about: the job in a few words.
    """

    words: list[str]
    environment: dict[str, str]
    asked: bool
    about: str


@dataclass
class AnyJob(ABC):
    """A mode that a process of its own plays.

    Attributes:
        results: by scenario or phase.
        import_s, start_s: seconds for importing vLLM and for starting the engine.
        error: what went wrong; empty if nothing did.
    """

    results: dict[str, Any] = field(default_factory=dict, init=False)
    import_s: float | None = field(default=None, init=False)
    start_s: float | None = field(default=None, init=False)
    error: str = field(default="", init=False)

    @property
    @abstractmethod
    def name(self) -> str:
        """For people, and for file names."""

    @abstractmethod
    def unavailable(self) -> str:
        """Why its mode cannot run here; empty if it can."""

    @abstractmethod
    def launch(self, setup: Any, spec: Path, events: Path) -> Launch:
        """Write what the process is told, and say how it is started."""

    @abstractmethod
    def record(self, setup: Any) -> dict[str, Any]:
        """For JSON."""

    def skipped(self, changed: Callable[[], None]) -> bool:
        """Whether it cannot run here; then its error says why, and ``changed`` is called."""
        self.error = self.unavailable()
        if self.error:
            say(f"[{self.name}] skipped: {self.error}")
            changed()
        return bool(self.error)


J = TypeVar("J", bound=AnyJob)
# Runs a set of jobs: the jobs, what is to be called when one has more results, and whether it is
# too late to begin more.
RunSet = Callable[[list[J], Callable[[], None], Callable[[], bool]], None]


def merge(document: dict[str, Any], paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Put the machines and jobs of earlier runs into the document; returns what was read."""
    earlier: list[dict[str, Any]] = [json.loads(path.read_text()) for path in paths]
    for read in earlier:
        document["machines"] += read["machines"]
        document["jobs"] += read["jobs"]
    return earlier


def note_machine(document: dict[str, Any]) -> None:
    """Write down and say on what this run is measured."""
    document["machines"].append(machine())
    say(json.dumps(document["machines"][-1], indent=1))


def play(
    planned: list[list[J]],
    run: RunSet[J],
    setup: Any,
    args: argparse.Namespace,
    document: dict[str, Any],
) -> None:
    """Run the sets of jobs, one after the other; their records go into the document at once.

    Args:
        args: ``time_limit``, seconds after which no set begins; ``json``, where the document is
            written whenever a job has more results.
    """
    before, began = list(document["jobs"]), time.monotonic()
    begun: list[J] = []

    def late() -> bool:
        return bool(time.monotonic() - began > args.time_limit)

    def changed() -> None:
        document["jobs"] = before + [job.record(setup) for job in begun]
        write_json(args.json, document)

    for number, jobs in enumerate(planned):
        if late():
            left = sum(map(len, planned[number:]))
            say(f"Time limit: {left} jobs not started, first {jobs[0].name}.")
            break
        begun += jobs
        run(jobs, changed, late)
        names = ", ".join(job.name for job in jobs)
        say(f"[{names}] done, {time.monotonic() - began:.0f} s since the beginning")
