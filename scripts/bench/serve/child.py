"""One job: starts an engine, plays scenarios, and writes what each gave at its end.

Run by `process` as ``python -m scripts.bench.serve.child SPEC``. SPEC is a JSON file with
``model``, ``engine`` (arguments of `vllm.LLM`), ``sizes``, ``scenarios``, ``floor`` and ``plain``
(see `load.Bench`), ``side_by_side``, ``host_copies`` (see there) and ``out``, the file that gets
one line of JSON for each event. What vLLM logs goes to this process's output.

Side by side with other engines it plays what its standard input asks for, a line at a time:
``s4 prepare``, then ``s4 quiet`` and the like, the name of the scenario being only a name for the
events. Between two lines it waits in `readline`, and vLLM's engine on its queue. The end of the
input ends it.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Report:
    """Appends events to a file that the parent follows."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115

    def event(self, kind: str, **values: Any) -> None:
        """One line, there at once even if this process is killed right after."""
        self._file.write(json.dumps({"event": kind, **values}) + "\n")

    def say(self, text: str) -> None:
        """Progress."""
        self.event("say", text=text)


def main() -> None:
    """Start, play, report."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    report = Report(spec["out"])
    began = time.perf_counter()
    from vllm import LLM

    from scripts.bench.serve import load
    from scripts.bench.serve.sizes import Sizes

    if spec["host_copies"]:
        from scripts.bench.serve import host_copies

        with reported(report, "start"):
            host_copies.install()
    imported = time.perf_counter()
    llm = LLM(model=spec["model"], skip_tokenizer_init=True, seed=0, **spec["engine"])
    ready = time.perf_counter()
    report.event("ready", import_s=imported - began, start_s=ready - imported)
    time.sleep(spec["sizes"]["settle_s"])
    bench = load.Bench(llm, Sizes(**spec["sizes"]), report.say, spec["floor"], spec["plain"])
    if spec["side_by_side"]:
        take_turns(bench, report)
    else:
        play_all(bench, report, spec["scenarios"])
    report.event("end")


def play_all(bench: Any, report: Report, scenarios: list[str]) -> None:
    """The scenarios, one after the other."""
    from scripts.bench.serve import load

    for name in scenarios:
        began = time.perf_counter()
        with reported(report, name):
            result = load.play(bench, name)
        seconds = time.perf_counter() - began
        report.event("result", scenario=name, seconds=seconds, result=result)


def take_turns(bench: Any, report: Report) -> None:
    """What standard input asks for, until it ends."""
    from scripts.bench.serve import arrivals

    player = arrivals.Arrivals(bench)
    for line in iter(sys.stdin.readline, ""):
        scenario, command = line.split()
        with reported(report, scenario):
            result = player.prepare() if command == "prepare" else player.play(command)
        report.event("played", scenario=scenario, command=command, result=result)


@contextmanager
def reported(report: Report, scenario: str) -> Iterator[None]:
    """What goes wrong within is an event, too, and ends this process."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        report.event("failed", scenario=scenario, error=f"{type(error).__name__}: {error}"[:500])
        raise


if __name__ == "__main__":
    main()
