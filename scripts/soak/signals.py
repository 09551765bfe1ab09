"""python scripts/soak signals [--phases idle,...] [--signals TERM,...] [--targets server,engine]

Sends a signal to a process of `vllm serve` while it starts, streams answers or is idle, each time
to a new server, plain and with the tier side by side. Says how long it took until all its processes
had ended, with which status, and what was left: processes, or files in shared memory. Plain vLLM
is the measure: where that hangs, too, it is not the tier's doing. Results go to signals.json in
--out. Status 1: one of them is worse with the tier.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from scripts.bench.common import machine, say, table, write_json
from scripts.soak import server as servers
from scripts.soak.server import Server
from scripts.soak.watch import is_dead, shared_files

SIDES = ("plain", "tier")
PHASES = ("starting", "streaming", "idle")
TARGETS = ("server", "engine")
SIGNALS = ("TERM", "INT", "KILL")
# Longer than vLLM waits for an engine core that shuts down; what takes longer hangs.
LIMIT_S = 60.0
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
    parser.add_argument("--out", type=Path, default=Path("soak-out"))
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
def phase_of(server: Server, phase: str) -> Iterator[None]:
    """Bring a server into a phase."""
    if phase == "starting":
        server.start()
        if wait_until(lambda: engine_of(server.pid), 120) is None:
            raise RuntimeError("expected an engine core within 120 s, found none")
        time.sleep(1)
        yield
        return
    server.start()
    server.wait_until_ready()
    if phase == "idle":
        yield
        return
    with streaming(server):
        yield


def trial(server: Server, phase: str, target: str, number: int) -> dict[str, Any]:
    """One signal, and what comes of it."""
    before = set(shared_files())
    with phase_of(server, phase):
        members = family(server.pid)
        aim = members[0] if target == "server" else engine_of(server.pid)
        if aim is None:
            raise RuntimeError("expected an engine core, found none")
        aim.send_signal(number)
        took = wait_until(lambda: server.status() is not None, LIMIT_S)
        pids = [process.pid for process in members]
        wait_until(lambda: all(map(is_dead, pids)), OTHERS_LIMIT_S)
        left = [pid for pid in pids if not is_dead(pid)]
    status = server.status()
    server.stop()
    return {
        "ended_after_s": took, "status": status, "processes_left": left,
        "files_left": sorted(set(shared_files()) - before),
    }  # fmt: skip


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


def main() -> int:
    """Every trial; status 1 if one of them is worse with the tier."""
    args = options()
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"machine": machine(), "trials": {}}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        servers.write_model(model)
        for case in itertools.product(args.phases, args.targets, args.signals):
            name, cells = " ".join(case), {}
            for side in args.sides:
                tier = {"KVOFFLOAD_CPU_GIB": "0.05"} if side == "tier" else None
                server = Server(model, args.out / f"{name} {side}.log", tier, {})
                number = getattr(signal, f"SIG{case[2]}")
                try:
                    cells[side] = trial(server, case[0], case[1], number)
                except RuntimeError as error:
                    server.stop()
                    cells[side] = {"error": str(error).splitlines()[0]}
                say(f"{name}, {side}: {in_words(cells[side])}")
            found["trials"][name] = cells
            write_json(args.out / "signals.json", found)
    rows = [["signal", *args.sides]]
    rows += [[name, *map(in_words, cells.values())] for name, cells in found["trials"].items()]
    say("\n" + table(rows))
    pairs = [(name, c) for name, c in found["trials"].items() if len(c) == len(SIDES)]
    bad = [name for name, cells in pairs if worse(cells["plain"], cells["tier"])]
    for name in bad:
        say(f"  MISS  {name}: worse with the tier")
    return 1 if bad else 0
