"""A job in a process of its own, followed while it runs and ended at its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from scripts import ROOT
from scripts.bench.common import say
from scripts.bench.jobs import AnyJob
from scripts.bench.serve.job import Job, Setup

POLL_S = 0.1


J = TypeVar("J", bound=AnyJob)


class Process(Generic[J]):
    """A job's process, started; its module says what is written to and read from it.

    Args:
        setup: has the folder ``out`` for files; the job knows the rest of it.
        changed: called without arguments whenever the job has more results.
    """

    def __init__(self, job: J, setup: Any, changed: Callable[[], None]) -> None:
        self.job = job
        self._changed = changed
        self._line = ""  # of an event that is not written to its end
        self._ended = False
        setup.out.mkdir(parents=True, exist_ok=True)
        events, self._log = setup.out / f"{job.name}.events", setup.out / f"{job.name}.log"
        events.write_text("")
        launch = job.launch(setup, setup.out / f"{job.name}.spec", events)
        say(f"[{job.name}] starting, {launch.about}")
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                launch.words, env=launch.environment,
                cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                stdin=subprocess.PIPE if launch.asked else None,
            )  # fmt: skip
        self._events = events.open()

    def follow(self, last: str, timeout: float) -> dict[str, Any] | None:
        """Take in events until one of the kind ``last``, and return it.

        None if it did not come: then the job's error says why.
        """
        job, began = self.job, time.monotonic()
        while not job.error:
            running = self._process.poll() is None  # asked before the file is read to its end
            while event := self._next():
                self._take(event)
                if event["event"] == last:
                    return event
            if not running:
                job.error = job.error or f"ended with status {self._process.returncode}"
            elif time.monotonic() - began > timeout:
                job.error = job.error or f"not done after {timeout:.0f} s"
            else:
                time.sleep(POLL_S)
        return None

    def _next(self) -> dict[str, Any] | None:
        """The next event that is written to its end."""
        while part := self._events.readline():
            self._line += part
            if self._line.endswith("\n"):
                event: dict[str, Any] = json.loads(self._line)
                self._line = ""
                return event
        return None

    def _take(self, event: dict[str, Any]) -> None:
        job, kind = self.job, event["event"]
        if kind == "say":
            say(f"[{job.name}] {event['text']}")
        elif kind == "ready":
            job.import_s, job.start_s = event["import_s"], event["start_s"]
            say(f"[{job.name}] engine up after {job.start_s:.1f} s (import {job.import_s:.1f} s)")
        elif kind == "result":
            job.results[event["scenario"]] = event["result"]
            self._changed()
        elif kind == "failed":
            job.error = f"{event['scenario']}: {event['error']}"

    def tell(self, line: str) -> None:
        """Ask for something. A process that is gone is found by the `follow` behind this."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()

    def hang_up(self) -> None:
        """Ask for nothing any more, which ends a process that waits to be asked."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def end(self) -> None:
        """Let it end or end it, and say what went wrong; the second time, nothing."""
        if self._ended:
            return
        self._ended = True
        self.hang_up()
        _end(self._process)
        self._events.close()
        if self.job.error:
            say(f"[{self.job.name}] failed: {self.job.error}; the end of {self._log}:")
            say("\n".join(self._log.read_text(errors="replace").splitlines()[-25:]))
        self._changed()


def run(job: Job, setup: Setup, changed: Callable[[], None]) -> None:
    """Run a job to its end, or to its time limit.

    Args:
        changed: called without arguments whenever the job has more results.
    """
    if job.skipped(changed):
        return
    process = Process(job, setup, changed)
    try:
        process.follow("end", setup.timeout)
    finally:
        process.end()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave time to end by itself, then end the whole group, and wait for it.

    The next job needs the memory, and tens of GiB take the system a while to take back.
    """
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    until = time.monotonic() + 60
    while _alive(process.pid) and time.monotonic() < until:
        time.sleep(POLL_S)


def _alive(group: int) -> bool:
    """Whether a process of the group is left, other than one that is only not yet collected."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, found = file.read_text().rpartition(")")[2].split()[:3]
            if int(found) == group and state != "Z":
                return True
    return False
