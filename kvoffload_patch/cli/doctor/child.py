"""A short child process that answers with one line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kvoffload_patch.cli.printable import printable

MARK = "KVOFFLOAD-DOCTOR "


def ask(arguments: Sequence[str], timeout_s: float, **variables: str) -> dict[str, Any]:
    """Run this Python with arguments and return what it says behind `MARK`.

    Returns:
        The object; or ``{"error": ...}`` with the last line on standard error, or with why there
        is none. Never raises for what the child does.
    """
    environ = {**os.environ, **variables}
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environ,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"TimeoutExpired: no answer within {timeout_s:.0f} s"}
    except OSError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARK):
            answer: dict[str, Any] = json.loads(line[len(MARK) :])
            return answer
    return {"error": printable(_why(done.stderr)) or f"exit status {done.returncode} and no answer"}


def answer(found: Mapping[str, object]) -> None:
    """What the child says."""
    print(MARK + json.dumps(found), flush=True)


def _why(stderr: str) -> str:
    """A refusal's own sentence, or the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("kvoffload_patch: ")]
    return (ours or lines or [""])[-1]
