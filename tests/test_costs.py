"""The CPU time that `--costs` prints."""

from __future__ import annotations

import subprocess
import sys

from costs import cpu_seconds

BURN = "import time\nwhile time.process_time() < 0.5: pass"


def test_a_process_that_was_started_counts_before_and_after_its_end() -> None:
    before = cpu_seconds()
    command = [sys.executable, "-c", f"{BURN}\nprint(flush=True)\ninput()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdin
        process.stdout.readline()
        running = cpu_seconds() - before
        process.communicate(b"\n")
    ended = cpu_seconds() - before
    assert 0.4 < running <= ended + 0.02
