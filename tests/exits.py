"""Processes that end while a thread of theirs is within torch."""

from __future__ import annotations

import ast
import subprocess
import sys

TIMES = 10

# One process imports what is needed, and its forks end as any process does that Python ends.
_TRIALS = """
import gc, os, sys, time
{imports}

# Else each fork looks through all of torch at its end, and copies the pages that it is on.
gc.collect()
gc.freeze()

def trial():
{trial}

ends = []
for _ in range({times}):
    pid = os.fork()
    if not pid:
        trial()
        time.sleep(0.02)
        break
    ends.append(os.waitpid(pid, 0)[1])
else:
    print(ends)
"""


def exits(trial: str, imports: str = "import torch") -> list[int]:
    """What `os.waitpid` says of each process that runs these lines, and ends soon after.

    Args:
        trial: lines of a function.
        imports: lines before it, run once.
    """
    lines = "".join(f"    {line}\n" for line in trial.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", _TRIALS.format(trial=lines, times=TIMES, imports=imports)],
        capture_output=True, text=True, timeout=120, check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    found: list[int] = ast.literal_eval(done.stdout)
    return found
