"""The scheduler half of releases: `python half.py JOBS RELEASE=SOURCES ...`, so many at a time.

SOURCES is the folder that has the release's `vllm/`. Prints a line of JSON for each release, in the
order in which they are done. Each runs in a process of its own, because it decides which vLLM that
process has; these are forked from one that has imported PyTorch and whatever else has no version of
vLLM in it, which takes longer than a release's scenarios.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

LIMIT_S = 600  # for a release
# What releases import besides vLLM. None of it looks at the release, and none starts a thread.
_SHARED = ("torch", "msgspec", "cbor2", "cloudpickle", "prometheus_client", "psutil", "pydantic")
_SHARED += ("regex", "urllib3", "uvloop", "zmq")
_OUTCOME = "OUTCOME "
_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS.parent), str(_TESTS)]


def use_release(release: str, folder: Path) -> None:
    """From now on, vLLM is this release in this process, and for `Mini`."""
    os.environ["KVOFFLOAD_VLLM_VERSION"] = release
    from scheduler_half import parts, sources

    sources.use(folder)
    from integration.engine.mini import Release

    Release.version = release
    Release.find = staticmethod(lambda module: _source(folder, module))
    Release.config = staticmethod(parts.make_config)


def run(names: list[str]) -> dict[str, dict[str, Any]]:
    """Of each scenario: "passed", "absent" or "failed", seconds, and what was seen or why."""
    from scheduler_half.scenarios import SCENARIOS

    return {name: _outcome(SCENARIOS[name]) for name in names or SCENARIOS}


def _outcome(scenario: Any) -> dict[str, Any]:
    from scheduler_half.scenarios import NotThere

    start = time.perf_counter()
    outcome: dict[str, Any]
    try:
        outcome = {"outcome": "passed", "seen": scenario()}
    except NotThere as reason:
        outcome = {"outcome": "absent", "why": str(reason)}
    except Exception:  # noqa: BLE001 - it is the outcome
        outcome = {
            "outcome": "failed",
            "why": "".join(traceback.format_exc().splitlines(True)[-12:]),
        }
    return {**outcome, "seconds": round(time.perf_counter() - start, 2)}


def _source(folder: Path, module: str) -> Path:
    base = folder.joinpath(*module.split("."))
    for candidate in (base / "__init__.py", base.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(str(base.with_suffix(".py").relative_to(folder)))


def main(jobs: str, *asked: str) -> None:
    """Print what came out of each release."""
    for name in _SHARED:
        with suppress(ImportError):
            importlib.import_module(name)
    left, under_way = list(reversed(asked)), dict[int, tuple[str, IO[str]]]()
    while left or under_way:
        while left and len(under_way) < int(jobs):
            release, _, folder = left.pop().partition("=")
            log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
            pid = os.fork()
            if not pid:
                _play(release, Path(folder), log.fileno())
            under_way[pid] = release, log
        pid, status = os.wait()
        release, log = under_way.pop(pid)
        log.seek(0)
        print(json.dumps({"release": release, **_read(log.read(), status)}), flush=True)
        log.close()


def _play(release: str, folder: Path, log: int) -> None:
    """Play in this process, and end it; the last line that it prints is the outcome."""
    status = 1
    try:
        signal.alarm(LIMIT_S)
        for stream in (1, 2):
            os.dup2(log, stream)
        use_release(release, folder.resolve())
        print(_OUTCOME + json.dumps(run([])), flush=True)
        status = 0
    except BaseException:  # noqa: BLE001 - it is the outcome
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _read(log: str, status: int) -> dict[str, Any]:
    """Scenarios of a process that has ended; the reason if there are none."""
    lines = [line for line in log.splitlines() if line.startswith(_OUTCOME)]
    if lines:
        return {"scenarios": json.loads(lines[-1][len(_OUTCOME) :])}
    why = f"status {os.waitstatus_to_exitcode(status)}: {log[-2000:]}"
    return {"scenarios": {"process": {"outcome": "failed", "why": why}}}


if __name__ == "__main__":
    main(*sys.argv[1:])
