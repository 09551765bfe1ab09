"""python scripts/soak signals [--phases idle,...] [--signals TERM,...] [--minutes M] [--out DIR]

Sends a signal to a process of `vllm serve` while it starts, streams answers or is idle, each time
to a new server, plain and with the tier side by side: the server, its engine core, or one of two
tensor-parallel workers (rank0, rank1; such a server has two of them, the others have one in the
engine core's process). Says how long it took until all its processes
had ended, with which status, and what was left: processes, or files in memory that ranks share.
Plain vLLM is the measure: where that hangs, too, it is not the tier's doing. Results go to
signals.json in --out, and a trial that is there is not made again: with --minutes, after which no
further trial is begun, all of them can be made in parts. Status 1: one of them is worse with the
tier, or some are left to be made.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from kvoffload_patch.cli.bench.errors import ServerFailed
from kvoffload_patch.control import client
from scripts.bench import arguments
from scripts.bench.common import machine, say, table, write_json
from scripts.soak import server as servers
from scripts.soak.server import Server
from scripts.soak.watch import files_left, is_dead

SIDES = ("plain", "tier")
PHASES = ("starting", "streaming", "idle")
RANKS = ("rank0", "rank1")
TARGETS = ("server", "engine", *RANKS)
SIGNALS = ("TERM", "INT", "KILL")
# Longer than vLLM waits for an engine core that shuts down; what takes longer hangs.
LIMIT_S = 30.0
# How long a server may take until it has the process that is to get the signal.
START_LIMIT_S = 120.0
# What is left when the first process has ended has so long to follow.
OTHERS_LIMIT_S = 10.0
PROMPT = list(range(3, 400))


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, known in (
        ("sides", SIDES), ("phases", PHASES), ("targets", TARGETS), ("signals", SIGNALS),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", default=",".join(known))
    parser.add_argument(
        "--minutes", type=arguments.positive, default=1e9, help="begin no trial after so many"
    )
    parser.add_argument("--out", type=arguments.filled, default=Path("soak-out"))
    args = parser.parse_args(argv)
    for name, known in (
        ("sides", SIDES), ("phases", PHASES), ("targets", TARGETS), ("signals", SIGNALS),
    ):  # fmt: skip
        chosen = getattr(args, name).split(",")
        if not set(chosen) <= set(known):
            parser.error(f"--{name}: expected some of {','.join(known)}, found {','.join(chosen)}")
        setattr(args, name, chosen)
    return args


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    with suppress(psutil.Error):
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    return []


def engine_of(pid: int) -> psutil.Process | None:
    """The engine core below a server, once there is one."""
    for process in family(pid)[1:]:
        with suppress(psutil.Error):
            if "EngineCore" in " ".join(process.cmdline()) + process.name():
                return process
    return None


def ranks_of(pid: int) -> list[psutil.Process]:
    """The workers below a server by rank, once all of them are there; else none."""
    engine = engine_of(pid)
    found: list[psutil.Process] = []
    with suppress(psutil.Error):
        for process in engine.children() if engine else ():
            if "resource_tracker" not in " ".join(process.cmdline()):
                found.append(process)
    # The executor starts them in the order of their ranks.
    return sorted(found, key=lambda one: (one.create_time(), one.pid))


def aim_of(pid: int, target: str) -> psutil.Process | None:
    """The process that is to get the signal, once it and its like are there."""
    if target == "server":
        return psutil.Process(pid)
    if target == "engine":
        return engine_of(pid)
    ranks = ranks_of(pid)
    return ranks[RANKS.index(target)] if len(ranks) == len(RANKS) else None


def session_of(pid: int) -> list[int]:
    """Processes that a server has started, whatever their parent is by now; dead ones left out."""
    found = []
    for other in psutil.pids():
        with suppress(OSError):
            if os.getsid(other) == pid and not is_dead(other):
                found.append(other)
    return found


def wait_until(holds: Callable[[], Any], limit_s: float) -> float | None:
    """Seconds until something holds; None if it does not in time."""
    begin = time.monotonic()
    while time.monotonic() < begin + limit_s:
        if holds():
            return round(time.monotonic() - begin, 1)
        time.sleep(0.1)
    return None


@contextmanager
def streaming(server: Server) -> Iterator[None]:
    """While it is entered, answers are being streamed."""
    begun = threading.Semaphore(0)

    def read(number: int) -> None:
        with suppress(Exception):  # the server is about to end
            for _ in server.ask([number + 3, *PROMPT], 400):
                begun.release()

    for number in range(4):
        threading.Thread(target=read, args=(number,), daemon=True).start()
    for _ in range(4):
        begun.acquire(timeout=60)
    yield


@contextmanager
def phase_of(server: Server, phase: str, target: str) -> Iterator[None]:
    """Bring a server into a phase; starting: an engine core is there, and the target."""
    if phase == "starting":
        server.start()
        first = "engine" if target == "server" else target
        if wait_until(lambda: aim_of(server.pid, first), START_LIMIT_S) is None:
            raise RuntimeError(f"expected {first} within {START_LIMIT_S:g} s, found none")
        time.sleep(1)
        yield
        return
    server.start()
    server.wait()
    if phase == "idle":
        yield
        return
    with streaming(server):
        yield


def trial(server: Server, phase: str, target: str, number: int) -> dict[str, Any]:
    """One signal, and what comes of it."""
    before = set(files_left())
    with phase_of(server, phase, target):
        first, aim = server.pid, aim_of(server.pid, target)
        if aim is None:
            raise RuntimeError(f"expected {target}, found none")
        pids = session_of(first)
        aim.send_signal(number)
        took = wait_until(lambda: server.status() is not None, LIMIT_S)
        wait_until(lambda: not session_of(first), OTHERS_LIMIT_S)
        left = session_of(first)
    status = server.status()
    server.kill()
    wait_until(lambda: not session_of(first), OTHERS_LIMIT_S)
    pids += left
    return {
        "ended_after_s": took, "status": status, "processes_left": left,
        "files_left": sorted(set(files_left()) - before) + sockets_of(pids),
    }  # fmt: skip


def sockets_of(pids: list[int]) -> list[str]:
    """Control sockets of processes that any command of ours finds, and has not cleared away."""
    named = (engine.name for engine in client.find())
    return [name for name in named if int(name.partition("-")[0]) in pids]


def in_words(found: dict[str, Any]) -> str:
    """One cell of the table."""
    if "error" in found:
        return str(found["error"])
    took = found["ended_after_s"]
    text = "hangs" if took is None else f"{took:g} s, status {found['status']}"
    if took is not None and found["processes_left"]:
        text += f", {len(found['processes_left'])} processes left"
    return text + (f", {len(found['files_left'])} files left" if found["files_left"] else "")


def worse(plain: dict[str, Any], tier: dict[str, Any]) -> bool:
    """Whether the tier ends in a way that plain vLLM does not."""
    if "error" in plain or "error" in tier:
        return "error" in tier
    hangs = tier["ended_after_s"] is None and plain["ended_after_s"] is not None
    return (
        hangs
        or len(tier["processes_left"]) > len(plain["processes_left"])
        or (len(tier["files_left"]) > len(plain["files_left"]))
    )


def earlier(file: Path) -> dict[str, Any]:
    """What a file has of earlier parts; without trials if there is none."""
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    return {"machine": machine(), "trials": {}}


def play(args: argparse.Namespace, model: Path, found: dict[str, Any]) -> int:
    """Make the trials that are not there yet, as far as time allows; how many are left."""
    until = time.monotonic() + 60 * args.minutes
    cases = list(itertools.product(args.phases, args.targets, args.signals, args.sides))
    cells: dict[str, dict[str, Any]] = found["trials"]
    package = machine()["package"]
    todo = [case for case in cases if case[3] not in cells.get(" ".join(case[:3]), {})]
    for done, (phase, target, kind, side) in enumerate(todo):
        if time.monotonic() > until:
            return len(todo) - done
        name = f"{phase} {target} {kind}"
        tier = {"KVOFFLOAD_CPU_GIB": "0.05"} if side == "tier" else None
        ranks = len(RANKS) if target in RANKS else 1
        server = Server(model, args.out / f"{name} {side}.log", tier, {}, ranks)
        try:
            cell = trial(server, phase, target, getattr(signal, f"SIG{kind}"))
        except (RuntimeError, ServerFailed) as error:
            cell = {"error": str(error).splitlines()[0]}
        finally:
            server.kill()
        say(f"{name}, {side}: {in_words(cell)}")
        cells.setdefault(name, {})[side] = {**cell, "package": package}
        write_json(args.out / "signals.json", found)
    return 0


def rows_of(found: dict[str, Any]) -> list[list[str]]:
    """A table of all trials, its head first."""
    rows = [["phase, process, signal", *SIDES]]
    for name, cells in found["trials"].items():
        rows.append([name, *(in_words(cells[side]) if side in cells else "" for side in SIDES)])
    return rows


def worse_ones(found: dict[str, Any]) -> list[str]:
    """Names of the trials that end worse with the tier than plain vLLM does."""
    pairs = [(name, c) for name, c in found["trials"].items() if len(c) == len(SIDES)]
    return [name for name, cells in pairs if worse(cells["plain"], cells["tier"])]


def main() -> int:
    """Every trial; status 1 if one of them is worse with the tier."""
    args = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its server is ended
    args.out.mkdir(parents=True, exist_ok=True)
    found = earlier(args.out / "signals.json")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        servers.write_model(model)
        left = play(args, model, found)
    say("\n" + table(rows_of(found)))
    bad = worse_ones(found)
    for name in bad:
        say(f"  MISS  {name}: worse with the tier")
    if left:
        say(f"{left} trials are left; the same command goes on with them")
    return 1 if bad or left else 0
