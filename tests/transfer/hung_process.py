"""A process that watches a copy which never ends, and ends by it; it can be stopped meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_PROGRAM = """
import logging, os, sys
from pathlib import Path
from kvoffload_patch.links import LOAD
from kvoffload_patch.transfer import deadline

go_on, status = Path(sys.argv[1]), int(sys.argv[2])
deadline.DEADLINE_S, deadline.GRACE_S, deadline.DEADLINE_PERIOD_S = 0.2, float(sys.argv[3]), 0.1
logging.basicConfig(level=logging.INFO)

class Queue:
    slices = 0

    def oldest(self):
        self.slices += go_on.exists()
        return deadline.Oldest(1, self.slices, True)

    def expire(self, ticket, reason):
        return False

    def awaited(self):
        return True

watch = deadline.DeadlineWatch({LOAD: Queue()}, lambda: None, end=lambda: os._exit(status))
watch.start()
print("begun", flush=True)
sys.stdin.read()
"""


class HungProcess:
    """It watches within the ``with``, with a deadline of 0.2 s."""

    STATUS, GRACE_S = 7, 1.5

    def __enter__(self) -> HungProcess:
        self._folder = tempfile.TemporaryDirectory()
        self._flag, self._log = (Path(self._folder.name) / name for name in ("go_on", "log"))
        asked = [str(self._flag), str(self.STATUS), str(self.GRACE_S)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *asked],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env={"PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"begun\n", self.log()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def wait_until_overdue(self) -> None:
        """Return when its copy is past its deadline, and the grace has begun."""
        until = time.monotonic() + 20
        while "no progress for" not in self.log():
            assert time.monotonic() < until, self.log()
            time.sleep(0.01)

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP; so much later, SIGCONT."""
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._process.send_signal(signal.SIGCONT)

    def let_copies_go_on(self) -> None:
        """From now on each look finds that another slice is enqueued."""
        self._flag.touch()

    def status(self, timeout_s: float) -> int | None:
        """Its exit status, if it ends in time."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def log(self) -> str:
        """What it has logged."""
        return self._log.read_text()
