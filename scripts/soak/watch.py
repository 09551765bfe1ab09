"""What a server's processes hold, over time: memory, threads, descriptors, shared memory."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

EVERY_S = 2.0
# As integration/shared_files.py makes them; the launch token's have an underscore.
_SHARED = re.compile(r"/memfd:(kvoffload-(\d+)-[0-9a-f]+)")


class Watch:
    """Samples a process and all below it, on a thread, within the ``with``.

    Args:
        pid: the first process.

    Attributes:
        samples: of each: seconds since the start, processes, RSS in MiB, threads, descriptors, and
            files in memory that ranks of theirs share.
        pids: of all processes seen.
    """

    def __init__(self, pid: int) -> None:
        self.samples: list[dict[str, float]] = []
        self.pids: set[int] = set()
        self._first = psutil.Process(pid)
        self._begin = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def left(self) -> list[int]:
        """Processes of those seen that are still there."""
        return sorted(pid for pid in self.pids if psutil.pid_exists(pid) and not is_dead(pid))

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            with suppress(psutil.Error):
                self.samples.append(self._sample())

    def _sample(self) -> dict[str, float]:
        totals = {"processes": 0.0, "rss_mib": 0.0, "threads": 0.0, "descriptors": 0.0}
        family = [self._first, *self._first.children(recursive=True)]
        for process in family:
            with suppress(psutil.Error), process.oneshot():
                found = process.memory_info().rss, process.num_threads(), process.num_fds()
                self.pids.add(process.pid)
                for name, value in zip(totals, (1, found[0] / (1 << 20), *found[1:])):
                    totals[name] += value
        at = round(time.monotonic() - self._begin, 1)
        files = shared_files(process.pid for process in family)
        return {"at_s": at, **totals, "shared_files": float(len(files))}


def is_dead(pid: int) -> bool:
    """Whether there is no such process, or only its entry."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def shared_files(pids: Iterable[int] | None = None) -> list[str]:
    """Files in memory that ranks share and that one of these processes has open or mapped.

    They have no name in any folder, so processes are what there is to look at.

    Args:
        pids: the processes; None: all whose entries this user can read.
    """
    return sorted({found[1] for found in _shared(psutil.pids() if pids is None else pids)})


def files_left() -> list[str]:
    """Files in memory that some process has although the engine that made them has ended."""
    return sorted({found[1] for found in _shared(psutil.pids()) if is_dead(int(found[2]))})


def _shared(pids: Iterable[int]) -> Iterable[re.Match[str]]:
    for pid in pids:
        process = Path(f"/proc/{pid}")
        with suppress(OSError):
            yield from _SHARED.finditer((process / "maps").read_text(errors="replace"))
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    yield from _SHARED.finditer(os.readlink(descriptor))


def growth(samples: list[dict[str, float]], name: str) -> float:
    """How much more the last quarter of a run has than its second quarter, on average."""
    quarter = len(samples) // 4
    if not quarter:
        return 0.0

    def mean(part: list[dict[str, float]]) -> float:
        return sum(sample[name] for sample in part) / len(part)

    return round(mean(samples[-quarter:]) - mean(samples[quarter : 2 * quarter]), 1)
