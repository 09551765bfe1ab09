"""What this process has of the machine: pages, mappings, files, threads."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections import Counter
from pathlib import Path


def resident_bytes() -> int:
    """Memory in use by this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def is_mapped(address: int) -> bool:
    """Whether an address belongs to a mapping."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return True
    return False


def unforked_bytes() -> int:
    """Bytes of mappings that a child process does not get (`MADV_DONTFORK`, "dc" in proc(5)).

    Only a tier's are such; others, the heap among them, grow and merge as they like.
    """
    smaps = Path("/proc/self/smaps").read_text()
    sizes = re.findall(r"^Size: +(\d+) kB$", smaps, re.MULTILINE)
    flags = re.findall(r"^VmFlags: (.*)$", smaps, re.MULTILINE)
    kept = (int(size) for size, flag in zip(sizes, flags, strict=True) if "dc" in flag.split())
    return sum(kept) << 10


def open_files() -> Counter[str]:
    """What the descriptors of this process lead to."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
        except FileNotFoundError:  # closed meanwhile, as the one that listed them
            continue
    return found


def files_opened_since(before: Counter[str]) -> Counter[str]:
    """Which of `open_files` are new, and still there when threads had 30 s to close theirs.

    Sockets, pipes and files of earlier tests may be closed at any time: fewer are no difference.
    """
    until = time.monotonic() + 30
    while (new := open_files() - before) and time.monotonic() < until:
        time.sleep(0.01)
    return new


_of_others: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def leave_out_running_threads() -> None:
    """What runs now was started before this test, and may end in the middle of it."""
    _of_others.clear()
    _of_others.update(threading.enumerate())


def kvoffload_threads() -> list[str]:
    """Our threads that this test has started and that are alive."""
    ours = (t for t in threading.enumerate() if t not in _of_others)
    return [t.name for t in ours if t.name.startswith("kvoffload-")]
