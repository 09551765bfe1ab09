"""A short child process that answers with one line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from kvoffload_patch.cli.printable import printable

MARK = "KVOFFLOAD-DOCTOR "


def ask(code: str, timeout_s: float, **variables: str) -> dict[str, Any]:
    """Run code in a child and return what it says behind `MARK`.

    Modules are looked for where this process looks. With ``-c`` and ``-m`` Python begins in the
    current folder, where an engine does not: a clone of vLLM's repository has a ``vllm``.

    Returns:
        The object; or ``{"error": ...}`` with the last line on standard error, or with why there
        is none. Never raises for what the child does.
    """
    environ = {**os.environ, **variables}
    path = f"import sys; sys.path[:] = {sys.path!a}\n"
    try:
        done = subprocess.run(
            [sys.executable, "-c", path + code],
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
